#include "other.cpp"
