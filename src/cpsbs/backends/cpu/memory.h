/* Scratch memory of a call, which is freed together. */

#pragma once

#include <stdint.h>
#include <stdlib.h>

/* What a function returns if there is too little memory; Python then raises a MemoryError. */
#define NO_MEMORY (-1)

/* What stands before each block: the address of the one before it, and so much that the rest is as
   well aligned as the block itself. */
#define BEFORE_BLOCK 64

typedef struct {
    void *last;
    int failed; /* whether there was too little: to be asked before anything is used */
} memory;

static inline void *room_for(memory *m, int64_t bytes) {
    void **block = m->failed ? 0 : malloc(BEFORE_BLOCK + bytes);
    if (!block) {
        m->failed = 1;
        return 0;
    }
    *block = m->last;
    m->last = block;
    return (char *)block + BEFORE_BLOCK;
}

static inline void release(memory *m) {
    while (m->last) {
        void **block = m->last;
        m->last = *block;
        free(block);
    }
}
