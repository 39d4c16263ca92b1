"""kvpolicy for PyTorch: which keys and values a transformer keeps, and how to learn that choice.

Policy and its parts describe a policy; build_mask and build_log_bias make masks, attend reads them;
future_mass and boundary_loss train the scorers of kvpolicy.scorers. docs/pytorch.md has examples. Cache runs
a policy online; kvpolicy.transformers has the cache of Hugging Face's generate (docs/transformers.md).
"""

from importlib.metadata import PackageNotFoundError, version

from kvpolicy._native import has_cuda
from kvpolicy.attention import attend, causal_lse, future_mass
from kvpolicy.caches import FULL, Cache, Usage
from kvpolicy.distillation import l2_distillation, top_distillation, top_logits
from kvpolicy.files import Scorers
from kvpolicy.gates import (
    LambdaController,
    compression_loss,
    eviction_sums,
    eviction_target,
    gate_density,
    gate_sparsity,
    retention_counts,
    retention_penalty,
    straight_through,
)
from kvpolicy.losses import BoundaryResult, boundary_loss
from kvpolicy.masks import (
    AnnealedGate,
    BernoulliGate,
    DmsGate,
    Mask,
    SoftGate,
    SoftWriteGate,
    ThresholdSoftGate,
    build_log_bias,
    build_mask,
)
from kvpolicy.metrics import (
    Coverage,
    Recall,
    coverage,
    density,
    evict_ratio,
    live_keys,
    open_gates,
    oracle_recall,
    retention_map,
)
from kvpolicy.observed import (
    H2O,
    TOVA,
    AccumulatedMass,
    LastMass,
    SnapKV,
    WindowMass,
    build_observed_mask,
    received_mass,
)
from kvpolicy.policy import (
    DMS,
    LTE,
    SPKV,
    UNLIMITED,
    WGKV,
    CppPart,
    Decay,
    EvictionGate,
    KVpop,
    Policy,
    Quest,
    QuestPages,
    SharedBudget,
    Sink,
    StreamingLLM,
    Stride,
    ThresholdGate,
    TopKBudget,
    Window,
)
from kvpolicy.scorers import (
    ConvScorer,
    LinearScorer,
    MLPScorer,
    Rope,
    Scorer,
    UtilityPredictor,
    WriteGateScorer,
    mLSTMScorer,
)

try:
    __version__ = version("kvpolicy")
except PackageNotFoundError:  # a source tree on the path
    __version__ = "unknown"

del PackageNotFoundError, version


def __getattr__(name):
    """KVPolicyCache, which needs transformers, is imported when it is asked for."""
    if name == "KVPolicyCache":
        from kvpolicy.transformers import KVPolicyCache

        return KVPolicyCache
    raise AttributeError(f"module kvpolicy has no attribute {name}")
