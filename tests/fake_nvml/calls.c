/* The frame of every call, and the handles. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FAILURES = 32, ANY_TIMES = 1 << 30 };

unsigned users;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool opened, is_changed;
static pid_t owner;
static long calls;
static int seen[MAX_FAILURES];

void changed(void)
{
    is_changed = true;
}

static void die_at(const char *variable)
{
    if (env_number(variable) == calls)
        _exit(137);
}

static void log_call(const char *name)
{
    const char *path = getenv("FAKE_NVML_LOG");
    if (!path || !*path)
        return;
    char line[128];
    int length = snprintf(line, sizeof line, "%s\n", name);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || write(file, line, (size_t)length) != length)
        fprintf(stderr, "fake nvml: FAKE_NVML_LOG: cannot write %s\n", path);
    if (file >= 0)
        close(file);
}

void env_list(const char *name, char *list, size_t size)
{
    const char *given = getenv(name);
    snprintf(list, size, "%s", given && given[0] != '@' ? given : "");
    FILE *file = given && given[0] == '@' ? fopen(given + 1, "r") : NULL;
    if (!file)
        return;
    list[fread(list, 1, size - 1, file)] = '\0';
    list[strcspn(list, "\n")] = '\0';
    fclose(file);
}

/* FAKE_NVML_FAIL: FUNCTION:CODE[:TIMES[:AFTER]], comma-separated; counted in this process. */
static nvmlReturn_t injected(const char *name)
{
    char list[4096];
    env_list("FAKE_NVML_FAIL", list, sizeof list);
    char *rest = NULL;
    int i = 0;
    for (char *entry = strtok_r(list, ",", &rest); entry && i < MAX_FAILURES; entry = strtok_r(NULL, ",", &rest), i++) {
        char function[128] = "";
        int code = 0, times = ANY_TIMES, after = 0;
        if (sscanf(entry, " %127[^:]:%d:%d:%d", function, &code, &times, &after) < 2)
            fprintf(stderr, "fake nvml: FAKE_NVML_FAIL: not FUNCTION:CODE[:TIMES[:AFTER]]: %s\n", entry);
        if (strcmp(function, name) != 0)
            continue;
        int before = seen[i]++;
        if (before >= after && before - after < times)
            return (nvmlReturn_t)code;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t call_begin(const char *name, bool initialized)
{
    pthread_mutex_lock(&mutex);
    if (owner != getpid()) {
        owner = getpid();
        calls = 0;
        memset(seen, 0, sizeof seen);
    }
    calls++;
    log_call(name);
    die_at("FAKE_NVML_DIE_AT");
    nvmlReturn_t failure = injected(name);
    if (failure != NVML_SUCCESS)
        return failure;
    if (initialized && users == 0)
        return NVML_ERROR_UNINITIALIZED;
    opened = machine_open();
    return opened ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

nvmlReturn_t call_end(nvmlReturn_t result)
{
    if (opened && is_changed && !machine_store())
        result = NVML_ERROR_OPERATING_SYSTEM;
    if (opened)
        machine_close();
    opened = is_changed = false;
    die_at("FAKE_NVML_DIE_AFTER");
    pthread_mutex_unlock(&mutex);
    return result;
}

void *handle_of(enum kind kind, unsigned index, uint32_t serial)
{
    return (void *)((uintptr_t)kind << 56 | (uintptr_t)index << 48 | (uintptr_t)serial << 8 | 0x5a);
}

void *gpu_handle(unsigned index)
{
    /* The real driver may void the handles of a GPU whose mode changes: nvml.h promises nothing. */
    uint32_t epoch = env_on("FAKE_NVML_STALE") ? machine.gpus[index].epoch : 0;
    return handle_of(KIND_GPU, index, epoch);
}

static bool stands(struct target *found, uint32_t serial)
{
    for (unsigned i = 0; i < found->gpu->instance_count; i++) {
        found->instance = &found->gpu->instances[i];
        found->compute = NULL;
        if (found->kind == KIND_INSTANCE && found->instance->serial == serial)
            return true;
        for (unsigned j = 0; found->kind != KIND_INSTANCE && j < found->instance->compute_count; j++) {
            found->compute = &found->instance->compute[j];
            if (found->compute->serial == serial)
                return true;
        }
    }
    return false;
}

nvmlReturn_t find(const void *handle, enum kind kind, struct target *found)
{
    uintptr_t number = (uintptr_t)handle;
    uint32_t serial = (uint32_t)(number >> 8);
    memset(found, 0, sizeof *found);
    found->kind = kind;
    found->index = number >> 48 & 0xFF;
    NEED(number >> 56 == kind && (number & 0xFF) == 0x5a && found->index < machine.gpu_count,
         NVML_ERROR_INVALID_ARGUMENT);
    found->gpu = &machine.gpus[found->index];
    if (kind == KIND_GPU)
        return handle == gpu_handle(found->index) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
    return stands(found, serial) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t find_device(const void *handle, struct target *found)
{
    return find(handle, KIND_DEVICE, found) == NVML_SUCCESS ? NVML_SUCCESS : find(handle, KIND_GPU, found);
}
