#include <everything.hpp>

const char* version_in_other() { return kvpolicy::version_string; }
