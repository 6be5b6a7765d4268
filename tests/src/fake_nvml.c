/* A management library of NVIDIA's with planted values: `values` beside the library, one `key value` a line, read at each
 * call. A value is a number or `error`, `lost` or `hang`; a key without a line is not supported. `gpus` is the number of
 * GPUs. Kinds of clocks, sensors, errors and statuses are numbered as NVML's are. Built as
 * `cc -shared -fPIC -o libnvidia-ml.so.1 fake_nvml.c`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15, UNKNOWN = 999 };

static int value_of(const char *key, uint64_t *value) {
    Dl_info self;
    char path[4096], line[256];
    if (!dladdr((void *)value_of, &self)) return UNKNOWN;
    snprintf(path, sizeof path - 16, "%s", self.dli_fname);
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, "values");
    FILE *file = fopen(path, "r");
    if (!file) return UNKNOWN;
    int status = NOT_SUPPORTED;
    while (fgets(line, sizeof line, file)) {
        char name[128], text[128];
        if (sscanf(line, "%127s %127s", name, text) != 2 || strcmp(name, key)) continue;
        if (!strcmp(text, "hang")) { fclose(file); for (;;) pause(); }
        status = !strcmp(text, "lost") ? LOST : !strcmp(text, "error") ? UNKNOWN : OK;
        if (status == OK) *value = strtoull(text, NULL, 0);
        break;
    }
    fclose(file);
    return status;
}

static int number(const char *key, unsigned *out) {
    uint64_t value = 0;
    int status = value_of(key, &value);
    if (status == OK) *out = (unsigned)value;
    return status;
}

const char *nvmlErrorString(int status) { return status == LOST ? "GPU is lost" : status == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }
int nvmlInit_v2(void) { uint64_t value; int status = value_of("init", &value); return status == NOT_SUPPORTED ? OK : status; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 0; int status = number("gpus", count); return status == NOT_SUPPORTED ? OK : status; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)(index + 1); return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device) { (void)pci; *device = (void *)1; return OK; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = (unsigned)(uintptr_t)device - 1; return OK; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) { (void)device; snprintf(name, length, "NVIDIA GB10"); return OK; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *v) { (void)d; return number("power", v); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *v) { (void)d; return number("power_limit", v); }
int nvmlDeviceGetPerformanceState(void *d, unsigned *v) { (void)d; return number("state", v); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *v) { (void)d; return number("pcie_generation", v); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *v) { (void)d; return number("pcie_generation_max", v); }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *v) { (void)d; return number("pcie_width", v); }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *v) { (void)d; return number("pcie_width_max", v); }
int nvmlDeviceGetPcieReplayCounter(void *d, unsigned *v) { (void)d; return number("pcie_replays", v); }
int nvmlDeviceGetTemperature(void *d, unsigned sensor, unsigned *v) { (void)d; return sensor ? INVALID : number("temperature", v); }
int nvmlDeviceGetTemperatureThreshold(void *d, unsigned kind, unsigned *v) { (void)d; return kind == 1 ? number("slowdown", v) : INVALID; }
int nvmlDeviceGetTotalEnergyConsumption(void *d, uint64_t *v) { (void)d; return value_of("energy", v); }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, uint64_t *v) { (void)d; return value_of("reasons", v); }

int nvmlDeviceGetClockInfo(void *d, unsigned kind, unsigned *v) {
    (void)d;
    return kind == 1 ? number("sm_clock", v) : kind == 2 ? number("memory_clock", v) : INVALID;
}
int nvmlDeviceGetMaxClockInfo(void *d, unsigned kind, unsigned *v) {
    (void)d;
    return kind == 1 ? number("sm_clock_max", v) : kind == 2 ? number("memory_clock_max", v) : INVALID;
}
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *active) {
    unsigned links = 0;
    (void)d;
    int status = number("nvlinks", &links);
    if (status != OK) return status;
    *active = 1;
    return link < links ? OK : INVALID;
}
int nvmlDeviceGetNvLinkErrorCounter(void *d, unsigned link, unsigned kind, uint64_t *v) {
    (void)d; (void)link;
    return kind == 0 ? value_of("nvlink_replays", v) : NOT_SUPPORTED;
}
int nvmlDeviceGetTotalEccErrors(void *d, unsigned kind, unsigned counter, uint64_t *v) {
    (void)d;
    return counter ? INVALID : value_of(kind ? "ecc_uncorrected" : "ecc_corrected", v);
}
