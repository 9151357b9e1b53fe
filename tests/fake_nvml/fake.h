/* What the files of the fake library share. */
#ifndef FAKE_NVML_FAKE_H
#define FAKE_NVML_FAKE_H

#include "abi.h"
#include "machine.h"

#include <stddef.h>

/* Every function of NVML begins and ends with these: they count and log the call, die or fail where the environment
   asks for it, and hold the machine in between. A call that fails at its begin has no effect. */
nvmlReturn_t call_begin(const char *name, bool initialized);
nvmlReturn_t call_end(nvmlReturn_t result);
/* The call has changed the machine, which is to be stored whatever the call returns. */
void changed(void);
/* What the variable *name* says, or the first line of the file that it names behind @. */
void env_list(const char *name, char *list, size_t size);
/* Users of the library in this process, from the first nvmlInit to the last nvmlShutdown. */
extern unsigned users;

#define CALL(initialized, expression)                                                                                  \
    do {                                                                                                               \
        nvmlReturn_t result_ = call_begin(__func__, initialized);                                                      \
        return call_end(result_ == NVML_SUCCESS ? (expression) : result_);                                             \
    } while (0)

/* Refuses where a condition does not hold. */
#define NEED(condition, code)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return code;                                                                                               \
    } while (0)

/* Returns a code that is not success. */
#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        nvmlReturn_t code_ = (expression);                                                                             \
        if (code_ != NVML_SUCCESS)                                                                                     \
            return code_;                                                                                              \
    } while (0)

/* What a handle stands for. A handle is a number with kind, GPU and serial in it, never an address. */
enum kind { KIND_GPU = 1, KIND_INSTANCE, KIND_COMPUTE, KIND_DEVICE };

struct target {
    enum kind kind;
    unsigned index;
    struct gpu *gpu;
    struct instance *instance; /* not of a GPU */
    struct compute *compute;   /* of a compute instance and of its MIG device */
};

void *handle_of(enum kind kind, unsigned index, uint32_t serial);
void *gpu_handle(unsigned index);
/* INVALID_ARGUMENT where the handle is of another kind, or what it stood for is gone. */
nvmlReturn_t find(const void *handle, enum kind kind, struct target *found);
/* A GPU or a MIG device. */
nvmlReturn_t find_device(const void *handle, struct target *found);

bool privileged(void);
unsigned total_mib(const struct gpu *gpu);
unsigned memory_mib(const struct gpu *gpu, const struct profile *profile);
const struct profile *profile_of(const struct gpu *gpu, const struct instance *instance);
/* The name that this driver gives a profile: FAKE_NVML_NAMES may have another than the user guide. */
const char *profile_name(const struct profile *profile);
/* Compute slices of a compute instance profile in a GPU instance; 0 where it has no such. */
unsigned compute_slices(const struct profile *profile, unsigned compute_profile);

/* devices.c */
nvmlReturn_t device_uuid(nvmlDevice_t device, char *uuid, unsigned length);
nvmlReturn_t device_by_uuid(const char *uuid, nvmlDevice_t *device);
nvmlReturn_t device_by_index(unsigned index, nvmlDevice_t *device);
nvmlReturn_t device_by_address(const char *address, nvmlDevice_t *device);
nvmlReturn_t device_name(nvmlDevice_t device, char *name, unsigned length);
nvmlReturn_t device_pci(nvmlDevice_t device, nvmlPciInfo_t *pci);
nvmlReturn_t device_index(nvmlDevice_t device, unsigned *index);
nvmlReturn_t device_memory(nvmlDevice_t device, unsigned long long *total);
nvmlReturn_t device_attributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes);
nvmlReturn_t device_processes(nvmlDevice_t device, enum use use, unsigned *count, nvmlProcessInfo_t *processes);

/* readings.c */
unsigned long long used_bytes(nvmlDevice_t device);
nvmlReturn_t reading_cuda(int *version);
nvmlReturn_t reading_ecc_mode(nvmlDevice_t device, unsigned *current, unsigned *pending);
nvmlReturn_t reading_ecc_errors(nvmlDevice_t device, unsigned kind, unsigned long long *count);
nvmlReturn_t reading_rows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                          unsigned *failed);
nvmlReturn_t reading_clocks(nvmlDevice_t device, unsigned long long *reasons);
nvmlReturn_t reading_fields(nvmlDevice_t device, int count, nvmlFieldValue_t *values);
nvmlReturn_t reading_utilization(nvmlDevice_t device, nvmlUtilization_t *rates);
nvmlReturn_t reading_temperature(nvmlDevice_t device, unsigned *degrees);
nvmlReturn_t reading_temperature_v(nvmlDevice_t device, nvmlTemperature_t *temperature);
nvmlReturn_t reading_power(nvmlDevice_t device, unsigned *milliwatts);
nvmlReturn_t reading_energy(nvmlDevice_t device, unsigned long long *millijoules);
nvmlReturn_t reading_fabric(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info);
nvmlReturn_t gpm_support(nvmlDevice_t device, nvmlGpmSupport_t *support);
nvmlReturn_t gpm_allocate(nvmlGpmSample_t *sample);
nvmlReturn_t gpm_free(nvmlGpmSample_t sample);
nvmlReturn_t gpm_sample(nvmlDevice_t device, nvmlGpmSample_t sample);
nvmlReturn_t gpm_sample_of(nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample);
nvmlReturn_t gpm_metrics(nvmlGpmMetricsGet_t *get);

/* mig.c */
nvmlReturn_t mig_get_mode(nvmlDevice_t device, unsigned *current, unsigned *pending);
nvmlReturn_t mig_set_mode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *status);
nvmlReturn_t mig_profile(nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_t *info);
nvmlReturn_t mig_profile_v2(nvmlDevice_t device, unsigned number, bool by_id, nvmlGpuInstanceProfileInfo_v2_t *info);
nvmlReturn_t mig_placements(nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *placements, unsigned *count);
nvmlReturn_t mig_capacity(nvmlDevice_t device, unsigned id, unsigned *count);
nvmlReturn_t mig_create(nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *placement, bool placed,
                        nvmlGpuInstance_t *instance);
nvmlReturn_t mig_destroy(nvmlGpuInstance_t instance);
nvmlReturn_t mig_instances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count);
nvmlReturn_t mig_instance_by_id(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance);
nvmlReturn_t mig_instance_info(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info);
nvmlReturn_t mig_device_count(nvmlDevice_t device, unsigned *count);
nvmlReturn_t mig_device_by_index(nvmlDevice_t device, unsigned index, nvmlDevice_t *found);
nvmlReturn_t mig_device_is(nvmlDevice_t device, unsigned *is);
nvmlReturn_t mig_device_ids(nvmlDevice_t device, bool compute, unsigned *id);
nvmlReturn_t mig_device_parent(nvmlDevice_t device, nvmlDevice_t *parent);

/* compute.c */
nvmlReturn_t compute_profile(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                             nvmlComputeInstanceProfileInfo_t *info);
nvmlReturn_t compute_profile_v2(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                                nvmlComputeInstanceProfileInfo_v2_t *info);
nvmlReturn_t compute_capacity(nvmlGpuInstance_t instance, unsigned id, unsigned *count);
nvmlReturn_t compute_placements(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstancePlacement_t *placements, unsigned *count);
nvmlReturn_t compute_create(nvmlGpuInstance_t instance, unsigned id, const nvmlComputeInstancePlacement_t *placement, bool placed,
                            nvmlComputeInstance_t *created);
nvmlReturn_t compute_destroy(nvmlComputeInstance_t compute);
nvmlReturn_t compute_instances(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found, unsigned *count);
nvmlReturn_t compute_by_id(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found);
nvmlReturn_t compute_info(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info);

#endif
