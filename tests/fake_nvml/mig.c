/* MIG mode, GPU instances and MIG devices. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

static nvmlReturn_t mig_gpu(nvmlDevice_t device, struct target *target)
{
    TRY(find(device, KIND_GPU, target));
    return board_of(target->gpu)->profile_count ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t mig_on(nvmlDevice_t device, struct target *target)
{
    TRY(mig_gpu(device, target));
    return target->gpu->current ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* For what nvml.h says "requires privileged user" of. */
static nvmlReturn_t mig_root(nvmlDevice_t device, struct target *target)
{
    TRY(mig_on(device, target));
    return privileged() ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

nvmlReturn_t mig_get_mode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct target target;
    TRY(mig_gpu(device, &target));
    NEED(current && pending, NVML_ERROR_INVALID_ARGUMENT);
    *current = target.gpu->current;
    *pending = target.gpu->pending;
    return NVML_SUCCESS;
}

/* Ampere unbinds the GPU for it, which fails while anybody has it open, monitors included; later GPUs only want it
   idle. */
static bool mode_blocked(const struct gpu *gpu)
{
    return gpu->instance_count || gpu_held(gpu, -1) || (!board_of(gpu)->resetless && gpu_open(gpu));
}

nvmlReturn_t mig_set_mode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *status)
{
    struct target target;
    TRY(mig_gpu(device, &target));
    NEED(mode <= 1 && status, NVML_ERROR_INVALID_ARGUMENT);
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    struct gpu *gpu = target.gpu;
    changed();
    gpu->pending = mode;
    *status = NVML_SUCCESS;
    if (gpu->current == mode)
        return NVML_SUCCESS;
    if (mode_blocked(gpu))
        *status = NVML_ERROR_IN_USE;
    else if ((gpu->guest || env_on("FAKE_NVML_NEEDS_RESET")) && !board_of(gpu)->resetless)
        *status = NVML_ERROR_RESET_REQUIRED;
    else
        gpu_activate(gpu, mode);
    return NVML_SUCCESS;
}

static const struct profile *by_id(const struct gpu *gpu, unsigned id)
{
    const struct board *board = board_of(gpu);
    for (unsigned i = 0; i < board->profile_count; i++)
        if (board->profiles[i].id == id)
            return &board->profiles[i];
    return NULL;
}

static const struct profile *by_number(const struct gpu *gpu, unsigned number)
{
    const struct board *board = board_of(gpu);
    for (unsigned i = 0; i < board->profile_count; i++)
        if (board->profiles[i].number == number)
            return &board->profiles[i];
    return NULL;
}

/* Some 535 drivers answer nothing of profiles while MIG is off; of placements all do. */
static bool silent(const struct gpu *gpu)
{
    return env_on("FAKE_NVML_SILENT_WHILE_OFF") && !gpu->current;
}

static nvmlReturn_t find_profile(nvmlDevice_t device, unsigned number, bool is_id, struct target *target,
                                 const struct profile **profile)
{
    TRY(mig_gpu(device, target));
    NEED(is_id || number < NVML_GPU_INSTANCE_PROFILE_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    *profile = is_id ? by_id(target->gpu, number) : by_number(target->gpu, number);
    return *profile ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t mig_profile(nvmlDevice_t device, unsigned number, nvmlGpuInstanceProfileInfo_t *info)
{
    struct target target;
    const struct profile *profile;
    NEED(info, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_profile(device, number, false, &target, &profile));
    NEED(!silent(target.gpu), NVML_ERROR_NOT_SUPPORTED);
    memset(info, 0, sizeof *info);
    info->id = profile->id;
    info->sliceCount = profile->slices;
    /* Some drivers understate it, on A30 above all. */
    info->instanceCount = env_on("FAKE_NVML_UNDERSTATE") ? 1 : profile->max_count;
    info->multiprocessorCount = profile->sm;
    info->memorySizeMB = memory_mib(target.gpu, profile);
    return NVML_SUCCESS;
}

nvmlReturn_t mig_profile_v2(nvmlDevice_t device, unsigned number, bool by_id, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct target target;
    const struct profile *profile;
    nvmlGpuInstanceProfileInfo_t first;
    NEED(info && info->version == nvmlGpuInstanceProfileInfo_v2, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_profile(device, number, by_id, &target, &profile));
    TRY(mig_profile(device, profile->number, &first));
    info->id = first.id;
    info->isP2pSupported = first.isP2pSupported;
    info->sliceCount = first.sliceCount;
    info->instanceCount = first.instanceCount;
    info->multiprocessorCount = first.multiprocessorCount;
    info->memorySizeMB = first.memorySizeMB;
    snprintf(info->name, sizeof info->name, "MIG %.80s", profile_name(profile));
    return NVML_SUCCESS;
}

nvmlReturn_t mig_placements(nvmlDevice_t device, unsigned id, nvmlGpuInstancePlacement_t *placements, unsigned *count)
{
    struct target target;
    const struct profile *profile;
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    TRY(find_profile(device, id, true, &target, &profile));
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    for (unsigned i = 0; placements && i < profile->start_count; i++)
        placements[i] = (nvmlGpuInstancePlacement_t){profile->starts[i], profile->size};
    *count = profile->start_count;
    return NVML_SUCCESS;
}

static bool media_excludes(enum media one, enum media other)
{
    return (one == MEDIA_ALL && other != MEDIA_NONE) || (one == MEDIA_EXTRA && other == MEDIA_EXTRA);
}

static bool has_room(const struct gpu *gpu, const struct profile *profile, unsigned start)
{
    unsigned same = 0, slices = profile->slices;
    for (unsigned i = 0; i < gpu->instance_count; i++) {
        const struct instance *instance = &gpu->instances[i];
        const struct profile *other = profile_of(gpu, instance);
        if (instance->start < start + profile->size && start < instance->start + instance->size)
            return false;
        if (media_excludes(profile->media, other->media) || media_excludes(other->media, profile->media))
            return false;
        same += other == profile;
        slices += other->slices;
    }
    return same < profile->max_count && slices <= board_of(gpu)->slices && gpu->instance_count < MAX_INSTANCES;
}

nvmlReturn_t mig_capacity(nvmlDevice_t device, unsigned id, unsigned *count)
{
    struct target target;
    const struct profile *profile;
    TRY(mig_root(device, &target));
    TRY(find_profile(device, id, true, &target, &profile));
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    struct gpu gpu = *target.gpu;
    *count = 0;
    for (unsigned i = 0; i < profile->start_count; i++)
        if (has_room(&gpu, profile, profile->starts[i])) {
            struct instance *next = &gpu.instances[gpu.instance_count++];
            next->profile = (unsigned)(profile - board_of(&gpu)->profiles);
            next->start = profile->starts[i];
            next->size = profile->size;
            ++*count;
        }
    return NVML_SUCCESS;
}

/* The driver's own choice: as high as possible, which fails for some orders as `nvidia-smi mig -cgi` does. */
static bool choose(const struct gpu *gpu, const struct profile *profile, unsigned *start)
{
    bool found = false;
    for (unsigned i = 0; i < profile->start_count; i++)
        if (has_room(gpu, profile, profile->starts[i]) && (!found || profile->starts[i] > *start)) {
            *start = profile->starts[i];
            found = true;
        }
    return found;
}

static bool allowed(const struct profile *profile, const nvmlGpuInstancePlacement_t *placement)
{
    for (unsigned i = 0; i < profile->start_count; i++)
        if (placement->start == profile->starts[i] && placement->size == profile->size)
            return true;
    return false;
}

nvmlReturn_t mig_create(nvmlDevice_t device, unsigned id, const nvmlGpuInstancePlacement_t *placement, bool placed,
                        nvmlGpuInstance_t *instance)
{
    struct target target;
    TRY(mig_root(device, &target));
    const struct profile *profile = by_id(target.gpu, id);
    NEED(profile && instance && (placement || !placed), NVML_ERROR_INVALID_ARGUMENT);
    NEED(!placed || allowed(profile, placement), NVML_ERROR_INVALID_ARGUMENT);
    unsigned start = placed ? placement->start : 0;
    bool room = placed ? has_room(target.gpu, profile, start) : choose(target.gpu, profile, &start);
    NEED(room, NVML_ERROR_INSUFFICIENT_RESOURCES);
    changed();
    struct instance *made = &target.gpu->instances[target.gpu->instance_count++];
    memset(made, 0, sizeof *made);
    made->serial = ++machine.serial;
    made->profile = (unsigned)(profile - board_of(target.gpu)->profiles);
    made->start = start;
    made->size = profile->size;
    /* 0 for the whole GPU, 1 and 2 for its halves, and so on. */
    made->id = board_of(target.gpu)->units / profile->size - 1 + start / profile->size;
    *instance = handle_of(KIND_INSTANCE, target.index, made->serial);
    return NVML_SUCCESS;
}

nvmlReturn_t mig_destroy(nvmlGpuInstance_t instance)
{
    struct target target;
    TRY(find(instance, KIND_INSTANCE, &target));
    NEED(privileged(), NVML_ERROR_NO_PERMISSION);
    NEED(!target.instance->compute_count && !gpu_held(target.gpu, (int)target.instance->id), NVML_ERROR_IN_USE);
    changed();
    if (target.instance->lingering) {
        target.instance->lingering--;
        return NVML_ERROR_IN_USE;
    }
    if (target.instance->staying) {
        target.instance->staying--;
        return NVML_SUCCESS;
    }
    struct instance *last = &target.gpu->instances[--target.gpu->instance_count];
    memmove(target.instance, target.instance + 1, (size_t)(last - target.instance) * sizeof *last);
    return NVML_SUCCESS;
}

/* Writes as many as there are and trusts the array, as the real library does: `count` is an output only. */
nvmlReturn_t mig_instances(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count)
{
    struct target target;
    TRY(mig_root(device, &target));
    const struct profile *profile = by_id(target.gpu, id);
    NEED(profile && instances && count, NVML_ERROR_INVALID_ARGUMENT);
    *count = 0;
    for (unsigned i = 0; i < target.gpu->instance_count; i++)
        if (profile_of(target.gpu, &target.gpu->instances[i]) == profile)
            instances[(*count)++] = handle_of(KIND_INSTANCE, target.index, target.gpu->instances[i].serial);
    return NVML_SUCCESS;
}

nvmlReturn_t mig_instance_by_id(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    struct target target;
    TRY(mig_root(device, &target));
    NEED(instance, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned i = 0; i < target.gpu->instance_count; i++)
        if (target.gpu->instances[i].id == id) {
            *instance = handle_of(KIND_INSTANCE, target.index, target.gpu->instances[i].serial);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t mig_instance_info(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct target target;
    TRY(find(instance, KIND_INSTANCE, &target));
    NEED(info, NVML_ERROR_INVALID_ARGUMENT);
    info->device = gpu_handle(target.index);
    info->id = target.instance->id;
    info->profileId = profile_of(target.gpu, target.instance)->id;
    info->placement = (nvmlGpuInstancePlacement_t){target.instance->start, target.instance->size};
    return NVML_SUCCESS;
}

nvmlReturn_t mig_device_count(nvmlDevice_t device, unsigned *count)
{
    struct target target;
    TRY(find(device, KIND_GPU, &target));
    NEED(count, NVML_ERROR_INVALID_ARGUMENT);
    *count = target.gpu->current ? board_of(target.gpu)->slices : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t mig_device_by_index(nvmlDevice_t device, unsigned index, nvmlDevice_t *found)
{
    struct target target;
    TRY(mig_on(device, &target));
    NEED(found && index < board_of(target.gpu)->slices, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned i = 0; i < target.gpu->instance_count; i++) {
        const struct instance *instance = &target.gpu->instances[i];
        if (index < instance->compute_count) {
            *found = handle_of(KIND_DEVICE, target.index, instance->compute[index].serial);
            return NVML_SUCCESS;
        }
        index -= instance->compute_count;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t mig_device_is(nvmlDevice_t device, unsigned *is)
{
    struct target target;
    TRY(find_device(device, &target));
    NEED(is, NVML_ERROR_INVALID_ARGUMENT);
    *is = target.kind == KIND_DEVICE;
    return NVML_SUCCESS;
}

nvmlReturn_t mig_device_ids(nvmlDevice_t device, bool compute, unsigned *id)
{
    struct target target;
    TRY(find(device, KIND_DEVICE, &target));
    NEED(id, NVML_ERROR_INVALID_ARGUMENT);
    *id = compute ? target.compute->id : target.instance->id;
    return NVML_SUCCESS;
}

nvmlReturn_t mig_device_parent(nvmlDevice_t device, nvmlDevice_t *parent)
{
    struct target target;
    TRY(find(device, KIND_DEVICE, &target));
    NEED(parent, NVML_ERROR_INVALID_ARGUMENT);
    *parent = gpu_handle(target.index);
    return NVML_SUCCESS;
}
