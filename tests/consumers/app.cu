#include "app.cpp"
