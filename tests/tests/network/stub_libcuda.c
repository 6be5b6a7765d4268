/* As much of the CUDA driver as takes kernels and says what there is: one device of the architecture that STUB_ARCH names
 * (121 unless it is set), which loads machine code for itself and for nothing else, and has no memory. What it loads it
 * says on stderr. Kinds of errors, attributes and fields of ELF files are numbered as NVIDIA's are. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_BINARY_FOR_GPU = 209, NOT_FOUND = 500 };

/* Anything with an address, where the driver gives handles. */
static int thing;

static int arch(void) {
    const char *named = getenv("STUB_ARCH");
    return named ? atoi(named) : 121;
}

int cuInit(unsigned flags) { (void)flags; return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)119 << 30; return OK; }

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "A stub of a GPU");
    return OK;
}

int cuDeviceGetPCIBusId(char *address, int length, int device) {
    (void)device;
    snprintf(address, (size_t)length, "0000:01:00.0");
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: *value = arch() / 10; break; /* compute capability, major */
    case 76: *value = arch() % 10; break; /* minor */
    case 16: *value = 48; break;          /* multiprocessors */
    case 18: *value = 1; break;           /* its memory is the host's */
    default: *value = 1 << 20;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &thing; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxSetCurrent(void *context) { (void)context; return OK; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &thing; return OK; }
int cuStreamSynchronize(void *stream) { (void)stream; return OK; }
int cuStreamDestroy_v2(void *stream) { (void)stream; return OK; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &thing; return OK; }
int cuEventSynchronize(void *event) { (void)event; return OK; }
int cuEventDestroy_v2(void *event) { (void)event; return OK; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    *memory = malloc(bytes);
    return *memory ? OK : OUT_OF_MEMORY;
}
int cuMemFreeHost(void *memory) { free(memory); return OK; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) { (void)address; (void)bytes; return OUT_OF_MEMORY; }
int cuMemFree_v2(uint64_t address) { (void)address; return OK; }
int cuMemGetInfo_v2(size_t *left, size_t *all) { *left = 0; *all = (size_t)119 << 30; return OK; }

/* What was loaded: the file, and how long it is. */
struct module {
    size_t bytes;
    unsigned char file[];
};

static uint64_t field(const unsigned char *at, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, at, bytes); /* Both are little-endian. */
    return value;
}

/* The length of an ELF file is that of its headers and of all sections that have bytes. */
static size_t length(const unsigned char *file) {
    const uint64_t headers = field(file + 40, 8), each = field(file + 58, 2), count = field(file + 60, 2);
    size_t end = headers + each * count;
    for (uint64_t i = 0; i < count; i++) {
        const unsigned char *header = file + headers + i * each;
        const size_t last = field(header + 24, 8) + field(header + 32, 8);
        if (field(header + 4, 4) != 8 && last > end) end = last;
    }
    return end;
}

int cuModuleLoadData(void **module, const void *image) {
    const unsigned char *file = image;
    if (memcmp(file, "\177ELF", 4) != 0 || field(file + 18, 2) != 190) return INVALID_VALUE;
    const int made_for = (int)(field(file + 48, 4) >> 8 & 0xff);
    if (made_for != arch()) return NO_BINARY_FOR_GPU;
    struct module *loaded = malloc(sizeof *loaded + length(file));
    if (!loaded) return OUT_OF_MEMORY;
    loaded->bytes = length(file);
    memcpy(loaded->file, file, loaded->bytes);
    fprintf(stderr, "the stub has loaded a module for sm_%d\n", made_for);
    *module = loaded;
    return OK;
}
int cuModuleUnload(void *module) { free(module); return OK; }

/* A kernel is in a module if its name is, zero and all, as the names of symbols are. */
int cuModuleGetFunction(void **function, void *module, const char *name) {
    const struct module *loaded = module;
    *function = &thing;
    return memmem(loaded->file, loaded->bytes, name, strlen(name) + 1) ? OK : NOT_FOUND;
}
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *bytes) {
    (void)function; (void)index; (void)offset; (void)bytes;
    return INVALID_VALUE;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)attribute; (void)function;
    *value = 0;
    return OK;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    (void)function; (void)attribute; (void)value;
    return OK;
}

int cuGetErrorName(int error, const char **name) { (void)error; *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "a stub has no memory"; return OK; }
