/* As much of the CUDA driver as says what there is: one device, which cannot be taken into use. */
#include <stddef.h>
#include <string.h>

enum { OK = 0, OUT_OF_MEMORY = 2 };

int cuInit(unsigned flags) { (void)flags; return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)119 << 30; return OK; }

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "A stub of a GB10", (size_t)length - 1);
    name[length - 1] = 0;
    return OK;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: *value = 12; break; /* compute capability, major */
    case 76: *value = 1; break;  /* minor */
    case 16: *value = 48; break; /* multiprocessors */
    case 18: *value = 1; break;  /* its memory is the host's */
    default: *value = 1 << 20;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = NULL; return OUT_OF_MEMORY; }
int cuGetErrorName(int error, const char **name) { (void)error; *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "a stub has no memory"; return OK; }
