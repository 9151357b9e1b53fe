/* What GPUs and MIG devices measure: FAKE_NVML_READINGS has it, since nothing here computes. See README.md. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA = 13020 };

/* GPU.NAME=VALUE or GPU/START.NAME=VALUE, comma-separated; what is not said is the default. */
static long reading(const struct target *target, const char *name, long otherwise)
{
    char place[32], list[4096];
    int length = snprintf(place, sizeof place, "%u", target->index);
    if (target->instance)
        snprintf(place + length, sizeof place - (size_t)length, "/%u", target->instance->start);
    env_list("FAKE_NVML_READINGS", list, sizeof list);
    char *rest = NULL;
    for (char *entry = strtok_r(list, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        char where[32] = "", what[64] = "", value[32] = "";
        if (sscanf(entry, " %31[^.].%63[^=]=%31s", where, what, value) != 3)
            fprintf(stderr, "fake nvml: FAKE_NVML_READINGS: not GPU.NAME=VALUE: %s\n", entry);
        else if (strcmp(where, place) == 0 && strcmp(what, name) == 0)
            return strtol(value, NULL, 0);
    }
    return otherwise;
}

static nvmlReturn_t of_gpu(nvmlDevice_t device, const char *name, long otherwise, long *value)
{
    struct target target;
    TRY(find_device(device, &target));
    NEED(target.kind == KIND_GPU, NVML_ERROR_NOT_SUPPORTED);
    *value = reading(&target, name, otherwise);
    return NVML_SUCCESS;
}

unsigned long long used_bytes(nvmlDevice_t device)
{
    struct target target;
    if (find_device(device, &target) != NVML_SUCCESS)
        return 0;
    return (unsigned long long)reading(&target, "used", 0) << 20;
}

nvmlReturn_t reading_cuda(int *version)
{
    NEED(version, NVML_ERROR_INVALID_ARGUMENT);
    long given = env_number("FAKE_NVML_CUDA");
    *version = given > 0 ? (int)given : CUDA;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_ecc_mode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    long on = 0;
    NEED(current && pending, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "ecc", 1, &on));
    *current = *pending = (unsigned)on;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_ecc_errors(nvmlDevice_t device, unsigned kind, unsigned long long *count)
{
    long errors = 0;
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "ecc_errors", 0, &errors));
    *count = kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED ? (unsigned long long)errors : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_rows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                          unsigned *failed)
{
    long waiting = 0, broken = 0;
    NEED(corrected && uncorrected && pending && failed, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "rows_pending", 0, &waiting));
    TRY(of_gpu(device, "rows_failed", 0, &broken));
    *corrected = *uncorrected = 0;
    *pending = waiting != 0;
    *failed = broken != 0;
    return NVML_SUCCESS;
}

/* One field alone; -1: a driver that does not know it. */
nvmlReturn_t reading_fields(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    NEED(values && count > 0, NVML_ERROR_INVALID_ARGUMENT);
    for (int i = 0; i < count; i++) {
        long action = 0;
        TRY(of_gpu(device, "recovery", 0, &action));
#ifdef FAKE_OLD_DRIVER
        action = -1;
#endif
        int known = values[i].fieldId == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION && action >= 0;
        values[i].nvmlReturn = known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        values[i].value = (unsigned long long)action;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t reading_clocks(nvmlDevice_t device, unsigned long long *reasons)
{
    long bits = 0;
    NEED(reasons, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "slowdown", 1, &bits));
    *reasons = (unsigned long long)bits;
    return NVML_SUCCESS;
}

/* Of GPUs without MIG only: the driver does not say which MIG device was busy. */
nvmlReturn_t reading_utilization(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    struct target target;
    NEED(rates, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_device(device, &target));
    NEED(target.kind == KIND_GPU && !target.gpu->current, NVML_ERROR_NOT_SUPPORTED);
    rates->gpu = (unsigned)reading(&target, "utilization", 0);
    rates->memory = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_temperature(nvmlDevice_t device, unsigned *degrees)
{
    long value = 0;
    NEED(degrees, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "temperature", 31, &value));
    *degrees = (unsigned)value;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_temperature_v(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    unsigned degrees = 0;
    NEED(temperature && temperature->version == nvmlTemperature_v1, NVML_ERROR_INVALID_ARGUMENT);
    TRY(reading_temperature(device, &degrees));
    temperature->temperature = (int)degrees;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_power(nvmlDevice_t device, unsigned *milliwatts)
{
    long value = 0;
    NEED(milliwatts, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "power", 70000, &value));
    *milliwatts = (unsigned)value;
    return NVML_SUCCESS;
}

nvmlReturn_t reading_energy(nvmlDevice_t device, unsigned long long *millijoules)
{
    long value = 0;
    NEED(millijoules, NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "energy", 0, &value));
    *millijoules = (unsigned long long)value;
    return NVML_SUCCESS;
}

/* Of Hopper and later. The caller of version 2 has no room for the last field. */
nvmlReturn_t reading_fabric(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    struct target target;
    long state = 0;
    NEED(info && (info->version == nvmlGpuFabricInfo_v2 || info->version == nvmlGpuFabricInfo_v3),
         NVML_ERROR_INVALID_ARGUMENT);
    TRY(of_gpu(device, "fabric", 0, &state));
    TRY(find_device(device, &target));
    NEED(board_of(target.gpu)->resetless, NVML_ERROR_NOT_SUPPORTED);
    unsigned version = info->version;
    memset(info, 0, version & 0xFFFFFF);
    info->version = version;
    info->state = (unsigned char)state;
    return NVML_SUCCESS;
}

/* GPU performance monitoring: Hopper and later. A sample is of one GPU, or of one instance on it. */
struct nvmlGpmSample_st {
    unsigned index;
    int instance; /* -1: the whole GPU; -2: nothing yet */
};

static bool has_gpm(const struct target *target)
{
    return board_of(target->gpu)->resetless;
}

nvmlReturn_t gpm_support(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    struct target target;
    NEED(support && support->version == NVML_GPM_SUPPORT_VERSION, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_device(device, &target));
    support->isSupportedDevice = has_gpm(&target);
    return NVML_SUCCESS;
}

nvmlReturn_t gpm_allocate(nvmlGpmSample_t *sample)
{
    NEED(sample, NVML_ERROR_INVALID_ARGUMENT);
    *sample = calloc(1, sizeof **sample);
    (*sample)->instance = -2;
    return NVML_SUCCESS;
}

nvmlReturn_t gpm_free(nvmlGpmSample_t sample)
{
    NEED(sample, NVML_ERROR_INVALID_ARGUMENT);
    free(sample);
    return NVML_SUCCESS;
}

static nvmlReturn_t take_sample(const struct target *target, int instance, nvmlGpmSample_t sample)
{
    NEED(has_gpm(target) && (instance >= 0 || !target->gpu->current), NVML_ERROR_NOT_SUPPORTED);
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    sample->index = target->index;
    sample->instance = instance;
    return NVML_SUCCESS;
}

/* Of a GPU, or of the instance that a MIG device is in. */
nvmlReturn_t gpm_sample(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    struct target target;
    NEED(sample, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_device(device, &target));
    return take_sample(&target, target.kind == KIND_DEVICE ? (int)target.instance->id : -1, sample);
}

nvmlReturn_t gpm_sample_of(nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample)
{
    struct target target;
    NEED(sample, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find(device, KIND_GPU, &target));
    for (unsigned i = 0; i < target.gpu->instance_count; i++)
        if (target.gpu->instances[i].id == instance)
            return take_sample(&target, (int)instance, sample);
    return has_gpm(&target) ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
}

/* The measures that there are readings of, by NVML's numbers. All are percents. */
static const char *measure(unsigned number)
{
    static const char *const names[] = {
        [NVML_GPM_METRIC_GRAPHICS_UTIL] = "graphics", [NVML_GPM_METRIC_SM_UTIL] = "sm",
        [NVML_GPM_METRIC_SM_OCCUPANCY] = "occupancy", [NVML_GPM_METRIC_ANY_TENSOR_UTIL] = "tensor",
        [NVML_GPM_METRIC_DRAM_BW_UTIL] = "dram",      [NVML_GPM_METRIC_FP64_UTIL] = "fp64",
        [NVML_GPM_METRIC_FP32_UTIL] = "fp32",         [NVML_GPM_METRIC_FP16_UTIL] = "fp16"};
    return number < sizeof names / sizeof *names ? names[number] : NULL;
}

nvmlReturn_t gpm_metrics(nvmlGpmMetricsGet_t *get)
{
    NEED(get && get->version == NVML_GPM_METRICS_GET_VERSION && get->sample1 && get->sample2, NVML_ERROR_INVALID_ARGUMENT);
    NEED(get->sample1->index == get->sample2->index && get->sample1->instance == get->sample2->instance &&
             get->sample1->instance > -2 && get->numMetrics <= NVML_GPM_METRIC_MAX,
         NVML_ERROR_INVALID_ARGUMENT);
    struct target target = {KIND_GPU, get->sample1->index, &machine.gpus[get->sample1->index], NULL, NULL};
    for (unsigned i = 0; i < target.gpu->instance_count; i++)
        if ((int)target.gpu->instances[i].id == get->sample1->instance)
            target.instance = &target.gpu->instances[i];
    for (unsigned i = 0; i < get->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &get->metrics[i];
        const char *name = measure(metric->metricId);
        metric->nvmlReturn = name ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        metric->value = name ? (double)reading(&target, name, 0) : 0;
    }
    return NVML_SUCCESS;
}
