"""The writer of python/kvpolicy/whole_file.py, for tools that run without the package."""

import importlib.util
import pathlib

_file = pathlib.Path(__file__).resolve().parents[1] / "python" / "kvpolicy" / "whole_file.py"
_spec = importlib.util.spec_from_file_location("kvpolicy_whole_file", _file)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

whole_path, whole_file, write_whole = _module.whole_path, _module.whole_file, _module.write_whole
output_lock = _module.output_lock
