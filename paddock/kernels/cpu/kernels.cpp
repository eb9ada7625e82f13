// The kernels of a CPU: what the files beside this folder are to a GPU, with the same names, roundings and layouts.
//
// Rows are shared among OpenMP's threads, and a row's numbers do not depend on how many there are; sums over rows are
// made in parts of CHUNK rows, which Python adds up. native.py calls what `find` finds; compiler.py compiles this file
// for the machine it runs on.

#include "decode.h"
#include "short_attention.h"
#include "layers.h"
#include "vocabulary.h"

// A kernel by its name, for numbers in float32 or in bfloat16, in the stream between layers too.
extern "C" const void *find(const char *name, bool narrow, bool narrow_stream) {
#define KERNEL(NAME)                                                                                                   \
    if (!strcmp(name, #NAME)) return narrow ? (const void *)NAME<bf16> : (const void *)NAME<float>;
#define STREAM(NAME)                                                                                                   \
    if (!strcmp(name, #NAME))                                                                                          \
        return !narrow ? (const void *)NAME<float, float>                                                              \
                       : narrow_stream ? (const void *)NAME<bf16, bf16> : (const void *)NAME<float, bf16>;
    STREAM(add_norm)
    STREAM(add_norm_backward)
    KERNEL(gated)
    KERNEL(gated_backward)
    KERNEL(rotary)
    KERNEL(rotary_backward)
    KERNEL(decode_attention)
    KERNEL(short_attention)
    KERNEL(short_attention_backward)
    KERNEL(gradient)
    if (!strcmp(name, "draw")) return (const void *)draw;
    if (!strcmp(name, "gather")) return (const void *)gather;
    return nullptr;
}
