/* GPUs and MIG devices: what they are called, how much memory they have, and who is on them. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Taken from the memory of a GPU instance by the driver for itself. */
enum { RESERVED_MIB = 256, NVIDIA = 0x10de };

bool privileged(void)
{
    return !env_on("FAKE_NVML_UNPRIVILEGED");
}

unsigned total_mib(const struct gpu *gpu)
{
    return board_of(gpu)->memory_mib;
}

unsigned memory_mib(const struct gpu *gpu, const struct profile *profile)
{
    return total_mib(gpu) * profile->size / board_of(gpu)->units - RESERVED_MIB;
}

const struct profile *profile_of(const struct gpu *gpu, const struct instance *instance)
{
    return &board_of(gpu)->profiles[instance->profile];
}

const char *profile_name(const struct profile *profile)
{
    static char drifted[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    const char *given = getenv("FAKE_NVML_NAMES");
    char list[1024];
    snprintf(list, sizeof list, "%s", given ? given : "");
    char *rest = NULL;
    for (char *pair = strtok_r(list, ",", &rest); pair; pair = strtok_r(NULL, ",", &rest)) {
        char *other = strchr(pair, '=');
        size_t length = other ? (size_t)(other - pair) : 0;
        if (length && strlen(profile->name) == length && strncmp(profile->name, pair, length) == 0) {
            snprintf(drifted, sizeof drifted, "%.90s", other + 1);
            return drifted;
        }
    }
    return profile->name;
}

static nvmlReturn_t text(char *to, unsigned length, const char *from)
{
    NEED(to, NVML_ERROR_INVALID_ARGUMENT);
    NEED(strlen(from) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(to, from);
    return NVML_SUCCESS;
}

static uint64_t hash(uint64_t start, const char *name)
{
    for (; *name; name++)
        start = (start ^ (unsigned char)*name) * 0x100000001b3u;
    return start ^ start >> 29;
}

/* Follows from the machine (FAKE_NVML_SEED), the GPU and the place, as on hardware. */
static void uuid_of(const struct target *target, char *uuid, size_t length)
{
    const char *seed = getenv("FAKE_NVML_SEED");
    char name[256];
    int end = snprintf(name, sizeof name, "%.99s/%u/%s", seed ? seed : "", target->index, board_of(target->gpu)->model);
    if (target->kind == KIND_DEVICE)
        snprintf(name + end, sizeof name - (size_t)end, "/%u/%u", target->instance->id, target->compute->id);
    uint64_t a = hash(0xcbf29ce484222325u, name), b = hash(a ^ 0x9e3779b97f4a7c15u, name);
    snprintf(uuid, length, "%s-%08x-%04x-5%03x-%04x-%012llx", target->kind == KIND_DEVICE ? "MIG" : "GPU",
             (unsigned)(a >> 32), (unsigned)(a >> 16 & 0xffff), (unsigned)(a & 0xfff),
             (unsigned)(b >> 48 & 0x3fff) | 0x8000, (unsigned long long)(b & 0xffffffffffff));
}

nvmlReturn_t device_uuid(nvmlDevice_t device, char *uuid, unsigned length)
{
    struct target target;
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    TRY(find_device(device, &target));
    uuid_of(&target, name, sizeof name);
    return text(uuid, length, name);
}

static nvmlReturn_t mig_device_by_uuid(unsigned index, const char *uuid, nvmlDevice_t *device)
{
    struct gpu *gpu = &machine.gpus[index];
    for (unsigned i = 0; i < gpu->instance_count; i++)
        for (unsigned j = 0; j < gpu->instances[i].compute_count; j++) {
            struct compute *compute = &gpu->instances[i].compute[j];
            struct target target = {KIND_DEVICE, index, gpu, &gpu->instances[i], compute};
            char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
            uuid_of(&target, name, sizeof name);
            if (strcmp(name, uuid) == 0) {
                *device = handle_of(KIND_DEVICE, index, compute->serial);
                return NVML_SUCCESS;
            }
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t device_by_uuid(const char *uuid, nvmlDevice_t *device)
{
    NEED(uuid && device, NVML_ERROR_INVALID_ARGUMENT);
    for (unsigned index = 0; index < machine.gpu_count; index++) {
        struct target target = {KIND_GPU, index, &machine.gpus[index], NULL, NULL};
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
        uuid_of(&target, name, sizeof name);
        if (strcmp(name, uuid) == 0)
            return device_by_index(index, device);
        if (mig_device_by_uuid(index, uuid, device) == NVML_SUCCESS)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t device_by_index(unsigned index, nvmlDevice_t *device)
{
    NEED(device && index < machine.gpu_count, NVML_ERROR_INVALID_ARGUMENT);
    *device = gpu_handle(index);
    return NVML_SUCCESS;
}

nvmlReturn_t device_by_address(const char *address, nvmlDevice_t *device)
{
    NEED(address && device, NVML_ERROR_INVALID_ARGUMENT);
    int index = gpu_at(address);
    NEED(index >= 0, NVML_ERROR_NOT_FOUND);
    return device_by_index((unsigned)index, device);
}

nvmlReturn_t device_name(nvmlDevice_t device, char *name, unsigned length)
{
    struct target target;
    char whole[2 * NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    TRY(find_device(device, &target));
    int end = snprintf(whole, NVML_DEVICE_NAME_V2_BUFFER_SIZE, "%s", board_of(target.gpu)->name);
    if (target.kind == KIND_DEVICE) {
        const struct profile *profile = profile_of(target.gpu, target.instance);
        char part[16] = "";
        if (target.compute->slices < profile->slices)
            snprintf(part, sizeof part, "%uc.", target.compute->slices);
        snprintf(whole + end, NVML_DEVICE_NAME_V2_BUFFER_SIZE, " MIG %s%s", part, profile_name(profile));
    }
    return text(name, length, whole);
}

nvmlReturn_t device_pci(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct target target;
    TRY(find_device(device, &target));
    NEED(pci, NVML_ERROR_INVALID_ARGUMENT);
    memset(pci, 0, sizeof *pci);
    pci->bus = pci_bus(target.index);
    pci->pciDeviceId = board_of(target.gpu)->pci_device_id << 16 | NVIDIA;
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", 0u, pci->bus & 0xff, 0u);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", 0u, pci->bus & 0xff, 0u);
    return NVML_SUCCESS;
}

nvmlReturn_t device_index(nvmlDevice_t device, unsigned *index)
{
    struct target target;
    TRY(find(device, KIND_GPU, &target));
    NEED(index, NVML_ERROR_INVALID_ARGUMENT);
    *index = target.index;
    return NVML_SUCCESS;
}

nvmlReturn_t device_memory(nvmlDevice_t device, unsigned long long *total)
{
    struct target target;
    TRY(find_device(device, &target));
    unsigned mib = total_mib(target.gpu);
    if (target.kind == KIND_DEVICE)
        mib = memory_mib(target.gpu, profile_of(target.gpu, target.instance));
    else
        /* What all partitions use together is not for everybody. */
        NEED(privileged() || !target.gpu->current, NVML_ERROR_NO_PERMISSION);
    *total = (unsigned long long)mib << 20;
    return NVML_SUCCESS;
}

nvmlReturn_t device_attributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    struct target target;
    TRY(find_device(device, &target));
    NEED(attributes, NVML_ERROR_INVALID_ARGUMENT);
    NEED(target.kind == KIND_DEVICE, NVML_ERROR_NOT_SUPPORTED);
    const struct profile *profile = profile_of(target.gpu, target.instance);
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = profile->sm * target.compute->slices / profile->slices;
    attributes->gpuInstanceSliceCount = profile->slices;
    attributes->computeInstanceSliceCount = target.compute->slices;
    attributes->memorySizeMB = memory_mib(target.gpu, profile);
    return NVML_SUCCESS;
}

static bool listed(const struct target *target, const struct process *process, enum use use)
{
    bool there = target->kind == KIND_GPU || process->instance == (int)target->instance->id;
    if (target->kind == KIND_DEVICE && process->compute >= 0)
        there = there && process->compute == (int)target->compute->id;
    return there && process->use == use && process_counts(process);
}

nvmlReturn_t device_processes(nvmlDevice_t device, enum use use, unsigned *count, nvmlProcessInfo_t *processes)
{
    struct target target;
    TRY(find_device(device, &target));
    NEED(count && (processes || !*count), NVML_ERROR_INVALID_ARGUMENT);
    NEED(target.kind == KIND_DEVICE || privileged() || !target.gpu->current, NVML_ERROR_NO_PERMISSION);
    unsigned found = 0;
    for (unsigned i = 0; i < target.gpu->process_count; i++) {
        const struct process *process = &target.gpu->processes[i];
        if (!listed(&target, process, use))
            continue;
        if (found < *count) {
            unsigned place = process->instance < 0 ? NO_INSTANCE : (unsigned)process->instance;
            unsigned compute = process->instance < 0 ? NO_INSTANCE : process->compute < 0 ? 0 : (unsigned)process->compute;
            processes[found] = (nvmlProcessInfo_t){(unsigned)process->pid, 1 << 20, place, compute};
        }
        found++;
    }
    bool room = found <= *count;
    *count = found;
    return room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
