/* Compute instances. Their profile ids are NVML's enumeration. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

unsigned compute_slices(const struct profile *profile, unsigned compute_profile)
{
    /* As `nvidia-smi mig -lcip` lists them: none of 6 and of 8 slices, and none that is for NVLink only. */
    static const unsigned slices[NVML_COMPUTE_INSTANCE_PROFILE_COUNT] = {1, 2, 3, 4, 7, 0, 0, 1, 0};
    /* The double-memory GPU instance has a compute profile of its own, and no other has it. */
    bool is_double = profile->number == NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2;
    if (is_double || compute_profile == NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1)
        return is_double && compute_profile == NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 ? 1 : 0;
    /* Nor one of three slices on a GPU instance of four. */
    if (compute_profile >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT || slices[compute_profile] > profile->slices)
        return 0;
    return slices[compute_profile] == 3 && profile->slices == 4 ? 0 : slices[compute_profile];
}

static nvmlReturn_t profile_in(nvmlGpuInstance_t instance, unsigned number, struct target *target, unsigned *slices)
{
    TRY(find(instance, KIND_INSTANCE, target));
    NEED(number < NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    *slices = compute_slices(profile_of(target->gpu, target->instance), number);
    return *slices ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t root_in(nvmlGpuInstance_t instance, unsigned number, struct target *target, unsigned *slices)
{
    TRY(profile_in(instance, number, target, slices));
    return privileged() ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

nvmlReturn_t compute_profile(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                             nvmlComputeInstanceProfileInfo_t *info)
{
    struct target target;
    unsigned slices;
    NEED(info && engine == NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, NVML_ERROR_INVALID_ARGUMENT);
    TRY(profile_in(instance, number, &target, &slices));
    const struct profile *profile = profile_of(target.gpu, target.instance);
    memset(info, 0, sizeof *info);
    info->id = number;
    info->sliceCount = slices;
    info->instanceCount = env_on("FAKE_NVML_UNDERSTATE") ? 1 : profile->slices / slices;
    info->multiprocessorCount = profile->sm * slices / profile->slices;
    return NVML_SUCCESS;
}

nvmlReturn_t compute_profile_v2(nvmlGpuInstance_t instance, unsigned number, unsigned engine,
                                nvmlComputeInstanceProfileInfo_v2_t *info)
{
    struct target target;
    unsigned slices;
    nvmlComputeInstanceProfileInfo_t first;
    NEED(info && info->version == nvmlComputeInstanceProfileInfo_v2, NVML_ERROR_INVALID_ARGUMENT);
    TRY(compute_profile(instance, number, engine, &first));
    TRY(profile_in(instance, number, &target, &slices));
    const struct profile *profile = profile_of(target.gpu, target.instance);
    info->id = first.id;
    info->sliceCount = first.sliceCount;
    info->instanceCount = first.instanceCount;
    info->multiprocessorCount = first.multiprocessorCount;
    char part[16] = "";
    if (slices < profile->slices)
        snprintf(part, sizeof part, "%uc.", slices);
    snprintf(info->name, sizeof info->name, "MIG %s%.70s", part, profile_name(profile));
    return NVML_SUCCESS;
}

static bool free_at(const struct instance *instance, unsigned start, unsigned slices)
{
    for (unsigned i = 0; i < instance->compute_count; i++) {
        const struct compute *other = &instance->compute[i];
        if (other->start < start + slices && start < other->start + other->slices)
            return false;
    }
    return true;
}

/* Where a compute instance may start, as go-nvml's H100 has it: at multiples of 1, of 2, and of 4 for one of 3 or 4. */
static unsigned step(unsigned slices)
{
    unsigned found = 1;
    while (found < slices)
        found *= 2;
    return found;
}

nvmlReturn_t compute_capacity(nvmlGpuInstance_t instance, unsigned id, unsigned *count)
{
    struct target target;
    unsigned slices;
    TRY(root_in(instance, id, &target, &slices));
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    unsigned all = profile_of(target.gpu, target.instance)->slices;
    *count = 0;
    for (unsigned start = 0; start + slices <= all; start += step(slices))
        *count += free_at(target.instance, start, slices);
    return NVML_SUCCESS;
}

nvmlReturn_t compute_placements(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstancePlacement_t *placements, unsigned *count)
{
    struct target target;
    unsigned slices;
    TRY(root_in(instance, id, &target, &slices));
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    unsigned all = profile_of(target.gpu, target.instance)->slices;
    *count = 0;
    for (unsigned start = 0; start + slices <= all; start += step(slices), ++*count)
        if (placements)
            placements[*count] = (nvmlComputeInstancePlacement_t){start, slices};
    return NVML_SUCCESS;
}

static unsigned free_id(const struct instance *instance)
{
    unsigned id = 0;
    for (unsigned i = 0; i < instance->compute_count; i++)
        if (instance->compute[i].id == id) {
            id++;
            i = (unsigned)-1;
        }
    return id;
}

nvmlReturn_t compute_create(nvmlGpuInstance_t instance, unsigned id, const nvmlComputeInstancePlacement_t *placement, bool placed,
                            nvmlComputeInstance_t *created)
{
    struct target target;
    unsigned slices, start = 0;
    TRY(root_in(instance, id, &target, &slices));
    unsigned all = profile_of(target.gpu, target.instance)->slices;
    NEED(created && (placement || !placed), NVML_ERROR_INVALID_ARGUMENT);
    bool right = placed && placement->size == slices && placement->start + slices <= all;
    NEED(!placed || (right && placement->start % step(slices) == 0), NVML_ERROR_INVALID_ARGUMENT);
    while (!placed && start + slices <= all && !free_at(target.instance, start, slices))
        start += step(slices);
    start = placed ? placement->start : start;
    NEED(start + slices <= all && free_at(target.instance, start, slices), NVML_ERROR_INSUFFICIENT_RESOURCES);
    NEED(target.instance->compute_count < MAX_COMPUTE, NVML_ERROR_INSUFFICIENT_RESOURCES);
    changed();
    unsigned number = free_id(target.instance);
    struct compute *made = &target.instance->compute[target.instance->compute_count++];
    *made = (struct compute){++machine.serial, number, id, slices, start};
    *created = handle_of(KIND_COMPUTE, target.index, made->serial);
    return NVML_SUCCESS;
}

nvmlReturn_t compute_destroy(nvmlComputeInstance_t compute)
{
    struct target target;
    TRY(find(compute, KIND_COMPUTE, &target));
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    NEED(!compute_held(target.gpu, (int)target.instance->id, (int)target.compute->id), NVML_ERROR_IN_USE);
    changed();
    struct compute *last = &target.instance->compute[--target.instance->compute_count];
    memmove(target.compute, target.compute + 1, (size_t)(last - target.compute) * sizeof *last);
    if (!target.instance->compute_count) {
        target.instance->lingering = (unsigned)env_number("FAKE_NVML_LINGER");
        target.instance->staying = (unsigned)env_number("FAKE_NVML_STAY");
    }
    return NVML_SUCCESS;
}

nvmlReturn_t compute_instances(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found, unsigned *count)
{
    struct target target;
    unsigned slices;
    TRY(root_in(instance, id, &target, &slices));
    NEED(found && count, NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    for (unsigned i = 0; i < target.instance->compute_count; i++)
        if (target.instance->compute[i].profile == id)
            found[(*count)++] = handle_of(KIND_COMPUTE, target.index, target.instance->compute[i].serial);
    return NVML_SUCCESS;
}

nvmlReturn_t compute_by_id(nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *found)
{
    struct target target;
    TRY(find(instance, KIND_INSTANCE, &target));
    NEED(found, NVML_ERROR_INVALID_ARGUMENT);
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    for (unsigned i = 0; i < target.instance->compute_count; i++)
        if (target.instance->compute[i].id == id) {
            *found = handle_of(KIND_COMPUTE, target.index, target.instance->compute[i].serial);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t compute_info(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info)
{
    struct target target;
    TRY(find(compute, KIND_COMPUTE, &target));
    NEED(info, NVML_ERROR_INVALID_ARGUMENT);
    info->device = handle_of(KIND_DEVICE, target.index, target.compute->serial);
    info->gpuInstance = handle_of(KIND_INSTANCE, target.index, target.instance->serial);
    info->id = target.compute->id;
    info->profileId = target.compute->profile;
    info->placement = (nvmlComputeInstancePlacement_t){target.compute->start, target.compute->slices};
    return NVML_SUCCESS;
}
