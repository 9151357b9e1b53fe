/* What the library exports: NVML's functions, each in the frame of a call. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#ifdef FAKE_OLD_DRIVER
#define DRIVER "470.223.02"
#else
#define DRIVER "595.58.03"
#endif

static nvmlReturn_t enter(void)
{
    if (users++ == 0)
        client_enter();
    return NVML_SUCCESS;
}

static nvmlReturn_t leave(void)
{
    if (--users == 0)
        client_leave();
    return NVML_SUCCESS;
}

static nvmlReturn_t driver_version(char *version, unsigned length)
{
    const char *given = getenv("FAKE_NVML_DRIVER");
    const char *text = given && *given ? given : DRIVER;
    NEED(version, NVML_ERROR_INVALID_ARGUMENT);
    NEED(strlen(text) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(version, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t count_gpus(unsigned *count)
{
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    *count = machine.gpu_count;
    return NVML_SUCCESS;
}

static nvmlReturn_t memory(nvmlDevice_t device, nvmlMemory_t *memory)
{
    NEED(memory, NVML_ERROR_INVALID_ARGUMENT);
    TRY(device_memory(device, &memory->total));
    memory->used = used_bytes(device);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

static nvmlReturn_t memory_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    NEED(memory && memory->version == nvmlMemory_v2, NVML_ERROR_INVALID_ARGUMENT);
    TRY(device_memory(device, &memory->total));
    memory->reserved = 0;
    memory->used = used_bytes(device);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

#define API(name, parameters, expression)                                                                              \
    EXPORT nvmlReturn_t name parameters;                                                                               \
    nvmlReturn_t name parameters { CALL(true, expression); }

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags);
EXPORT nvmlReturn_t nvmlInit_v2(void);
EXPORT const char *nvmlErrorString(nvmlReturn_t result);

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    CALL(false, enter());
}

nvmlReturn_t nvmlInit_v2(void)
{
    CALL(false, enter());
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "The operating system has blocked the request",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
        "ECC is not supported with this vGPU", "Insufficient Resources", "Frequency not supported",
        "Argument version mismatch", "Deprecated", "Not ready", "GPU not found", "Invalid state",
        "Reset type not supported"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "Unknown Error";
}

API(nvmlShutdown, (void), leave())
API(nvmlSystemGetDriverVersion, (char *version, unsigned length), driver_version(version, length))
API(nvmlDeviceGetCount_v2, (unsigned *count), count_gpus(count))
API(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *device), device_by_index(index, device))
API(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), device_by_uuid(uuid, device))
API(nvmlDeviceGetHandleByPciBusId_v2, (const char *address, nvmlDevice_t *device), device_by_address(address, device))
API(nvmlDeviceGetUUID, (nvmlDevice_t device, char *uuid, unsigned length), device_uuid(device, uuid, length))
API(nvmlDeviceGetName, (nvmlDevice_t device, char *name, unsigned length), device_name(device, name, length))
API(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci), device_pci(device, pci))
API(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned *index), device_index(device, index))
API(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned *number), device_index(device, number))
API(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *info), memory(device, info))
API(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *info), memory_v2(device, info))
API(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes),
    device_attributes(device, attributes))
API(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes),
    device_processes(device, USE_COMPUTE, count, processes))
API(nvmlDeviceGetGraphicsRunningProcesses_v2, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes),
    device_processes(device, USE_GRAPHICS, count, processes))

API(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned *current, unsigned *pending),
    mig_get_mode(device, current, pending))
API(nvmlDeviceSetMigMode, (nvmlDevice_t device, unsigned mode, nvmlReturn_t *status),
    mig_set_mode(device, mode, status))
API(nvmlDeviceGetGpuInstanceProfileInfo,
    (nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_t *info), mig_profile(device, number, info))
API(nvmlDeviceGetGpuInstancePossiblePlacements_v2,
    (nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *placements, unsigned *count),
    mig_placements(device, id, placements, count))
API(nvmlDeviceGetGpuInstanceRemainingCapacity, (nvmlDevice_t device, unsigned id, unsigned *count),
    mig_capacity(device, id, count))
API(nvmlDeviceCreateGpuInstance, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance),
    mig_create(device, id, NULL, false, instance))
API(nvmlDeviceCreateGpuInstanceWithPlacement,
    (nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *placement, nvmlGpuInstance_t *instance),
    mig_create(device, id, placement, true, instance))
API(nvmlGpuInstanceDestroy, (nvmlGpuInstance_t instance), mig_destroy(instance))
API(nvmlDeviceGetGpuInstances, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count),
    mig_instances(device, id, instances, count))
API(nvmlDeviceGetGpuInstanceById, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance),
    mig_instance_by_id(device, id, instance))
API(nvmlGpuInstanceGetInfo, (nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info),
    mig_instance_info(instance, info))

API(nvmlGpuInstanceGetComputeInstanceProfileInfo,
    (nvmlGpuInstance_t instance, unsigned number, unsigned engine, nvmlComputeInstanceProfileInfo_t *info),
    compute_profile(instance, number, engine, info))
API(nvmlGpuInstanceGetComputeInstanceRemainingCapacity, (nvmlGpuInstance_t instance, unsigned id, unsigned *count),
    compute_capacity(instance, id, count))
API(nvmlGpuInstanceGetComputeInstancePossiblePlacements,
    (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstancePlacement_t *placements, unsigned *count),
    compute_placements(instance, id, placements, count))
API(nvmlGpuInstanceCreateComputeInstance,
    (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *created),
    compute_create(instance, id, NULL, false, created))
API(nvmlGpuInstanceCreateComputeInstanceWithPlacement,
    (nvmlGpuInstance_t instance, unsigned id, const nvmlComputeInstancePlacement_t *placement, nvmlComputeInstance_t *created),
    compute_create(instance, id, placement, true, created))
API(nvmlComputeInstanceDestroy, (nvmlComputeInstance_t compute), compute_destroy(compute))
API(nvmlGpuInstanceGetComputeInstances,
    (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found, unsigned *count),
    compute_instances(instance, id, found, count))
API(nvmlGpuInstanceGetComputeInstanceById, (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found),
    compute_by_id(instance, id, found))
API(nvmlComputeInstanceGetInfo_v2, (nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info),
    compute_info(compute, info))

API(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned *is), mig_device_is(device, is))
API(nvmlDeviceGetGpuInstanceId, (nvmlDevice_t device, unsigned *id), mig_device_ids(device, false, id))
API(nvmlDeviceGetComputeInstanceId, (nvmlDevice_t device, unsigned *id), mig_device_ids(device, true, id))
API(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, unsigned *count), mig_device_count(device, count))
API(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t device, unsigned index, nvmlDevice_t *found),
    mig_device_by_index(device, index, found))
API(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t device, nvmlDevice_t *parent),
    mig_device_parent(device, parent))

API(nvmlSystemGetCudaDriverVersion_v2, (int *version), reading_cuda(version))
API(nvmlDeviceGetEccMode, (nvmlDevice_t device, unsigned *current, unsigned *pending),
    reading_ecc_mode(device, current, pending))
API(nvmlDeviceGetTotalEccErrors, (nvmlDevice_t device, unsigned kind, unsigned counter, unsigned long long *count),
    ((void)counter, reading_ecc_errors(device, kind, count)))
API(nvmlDeviceGetRemappedRows,
    (nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed),
    reading_rows(device, corrected, uncorrected, pending, failed))
API(nvmlDeviceGetFieldValues, (nvmlDevice_t device, int count, nvmlFieldValue_t *values),
    reading_fields(device, count, values))
API(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *reasons),
    reading_clocks(device, reasons))
API(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *rates), reading_utilization(device, rates))
API(nvmlDeviceGetTemperature, (nvmlDevice_t device, unsigned sensor, unsigned *degrees),
    ((void)sensor, reading_temperature(device, degrees)))
API(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned *milliwatts), reading_power(device, milliwatts))
API(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, unsigned long long *millijoules),
    reading_energy(device, millijoules))

#ifndef FAKE_OLD_DRIVER
/* Newer than R510. */
API(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, unsigned long long *reasons),
    reading_clocks(device, reasons))
API(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *temperature),
    reading_temperature_v(device, temperature))
API(nvmlDeviceGetGpuFabricInfoV, (nvmlDevice_t device, nvmlGpuFabricInfoV_t *info), reading_fabric(device, info))
API(nvmlGpmQueryDeviceSupport, (nvmlDevice_t device, nvmlGpmSupport_t *support), gpm_support(device, support))
API(nvmlGpmSampleAlloc, (nvmlGpmSample_t *sample), gpm_allocate(sample))
API(nvmlGpmSampleFree, (nvmlGpmSample_t sample), gpm_free(sample))
API(nvmlGpmSampleGet, (nvmlDevice_t device, nvmlGpmSample_t sample), gpm_sample(device, sample))
API(nvmlGpmMigSampleGet, (nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample),
    gpm_sample_of(device, instance, sample))
API(nvmlGpmMetricsGet, (nvmlGpmMetricsGet_t *get), gpm_metrics(get))
/* Since R510. */
API(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes),
    device_processes(device, USE_COMPUTE, count, processes))
API(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes),
    device_processes(device, USE_GRAPHICS, count, processes))
API(nvmlDeviceGetGpuInstanceProfileInfoV,
    (nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_v2_t *info),
    mig_profile_v2(device, number, false, info))
API(nvmlDeviceGetGpuInstanceProfileInfoByIdV,
    (nvmlDevice_t device, unsigned id, nvmlGpuInstanceProfileInfo_v2_t *info), mig_profile_v2(device, id, true, info))
API(nvmlGpuInstanceGetComputeInstanceProfileInfoV,
    (nvmlGpuInstance_t instance, unsigned number, unsigned engine, nvmlComputeInstanceProfileInfo_v2_t *info),
    compute_profile_v2(instance, number, engine, info))
#endif
