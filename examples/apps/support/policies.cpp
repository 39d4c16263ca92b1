#include "policies.hpp"

namespace examples {

template std::unique_ptr<llama::KvAttention> make_attention<kvpolicy::bf16>(const kvpolicy::host&,
                                                                            const llama::Config&,
                                                                            const PolicyChoice&,
                                                                            std::int32_t);

}  // namespace examples
