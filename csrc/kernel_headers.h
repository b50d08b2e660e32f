// What the kernels include, ahead of any target pragma so that no inline function of a standard
// header is compiled for an instruction set that the processor may lack.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel_table.h"
