/* The machine and its file: one structure, replaced as a whole under a lock that every process takes. */
#define _GNU_SOURCE
#include "machine.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define FORMAT "fake-nvml 4"
#define DEFAULT_GPUS                                                                                                   \
    "h100_80gb,h100_80gb,h100_80gb,h100_80gb,h100_80gb,h100_80gb,h100_80gb,h100_80gb"
#define PATH_SIZE 4096

struct machine machine;

static int lock = -1;
static int client = -1;

bool env_on(const char *name)
{
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

long env_number(const char *name)
{
    const char *value = getenv(name);
    return value ? strtol(value, NULL, 10) : 0;
}

/* FAKE_NVML_STATE, or a file beside this library or program; with `suffix` behind it. */
static const char *state_path(const char *suffix)
{
    static char path[PATH_SIZE];
    const char *given = getenv("FAKE_NVML_STATE");
    char home[PATH_SIZE - 64] = "";
    if (!given || !*given) {
#ifdef FAKE_NVML_PROGRAM
        if (readlink("/proc/self/exe", home, sizeof home - 1) < 0)
            home[0] = 0;
#else
        Dl_info info;
        if (dladdr((void *)&machine, &info))
            snprintf(home, sizeof home, "%s", info.dli_fname);
#endif
        char *slash = strrchr(home, '/');
        if (slash)
            *slash = 0;
        else
            strcpy(home, ".");
        strcat(home, "/state");
        given = home;
    }
    snprintf(path, sizeof path, "%s%s", given, suffix);
    return path;
}

static bool refuse(const char *what, const char *which)
{
    fprintf(stderr, "fake nvml: %s %s\n", what, which);
    return false;
}

static int locked_file(const char *suffix, int operation)
{
    int file = open(state_path(suffix), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0)
        return -1;
    while (flock(file, operation) < 0 && errno == EINTR)
        continue;
    return file;
}

bool machine_open(void)
{
    lock = locked_file(".lock", LOCK_EX);
    if (lock < 0)
        return refuse(strerror(errno), state_path(".lock"));
    const char *models = getenv("FAKE_NVML_GPUS");
    bool given = models && *models;
    int file = open(state_path(""), O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, &machine, sizeof machine);
    if (file >= 0)
        close(file);
    bool whole = length == (ssize_t)sizeof machine && strcmp(machine.format, FORMAT) == 0;
    if (whole && (!given || strcmp(machine.models, models) == 0))
        return true;
    if (machine_make(given ? models : DEFAULT_GPUS) && machine_store())
        return true;
    machine_close();
    return false;
}

bool machine_store(void)
{
    char path[PATH_SIZE];
    snprintf(path, sizeof path, "%s", state_path(".new"));
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0)
        return refuse(strerror(errno), path);
    ssize_t written = write(file, &machine, sizeof machine);
    close(file);
    if (written != (ssize_t)sizeof machine || rename(path, state_path("")) < 0)
        return refuse(strerror(errno), path);
    return true;
}

void machine_close(void)
{
    close(lock);
    lock = -1;
}

/* By the whole name, or by a part up to an underscore that only one has: "a30" is a30_24gb. */
static int find_board(const char *model)
{
    size_t length = strlen(model);
    int found = -1, matches = 0;
    for (unsigned i = 0; i < board_count; i++) {
        if (strcmp(boards[i].model, model) == 0)
            return (int)i;
        if (strncmp(boards[i].model, model, length) == 0 && boards[i].model[length] == '_') {
            found = (int)i;
            matches++;
        }
    }
    if (matches == 1)
        return found;
    fprintf(stderr, "fake nvml: FAKE_NVML_GPUS: no model \"%s\"; there are", model);
    for (unsigned i = 0; i < board_count; i++)
        fprintf(stderr, " %s", boards[i].model);
    fputc('\n', stderr);
    return -1;
}

bool machine_make(const char *models)
{
    char list[sizeof machine.models];
    if (strlen(models) >= sizeof list)
        return refuse("too many GPUs:", models);
    uint32_t serial = machine.serial;
    memset(&machine, 0, sizeof machine);
    /* What a client still holds of the machine before is to be refused by this one. */
    machine.serial = serial + 1;
    strcpy(machine.format, FORMAT);
    strcpy(machine.models, models);
    strcpy(list, models);
    char *rest = NULL;
    for (char *model = strtok_r(list, ", ", &rest); model; model = strtok_r(NULL, ", ", &rest)) {
        int board = find_board(model);
        if (board < 0)
            return false;
        if (machine.gpu_count == MAX_GPUS)
            return refuse("at most 16 GPUs:", models);
        machine.gpus[machine.gpu_count++].board = (unsigned)board;
    }
    return true;
}

void client_enter(void)
{
    client = locked_file(".clients", LOCK_SH);
}

/* Also where the library is unloaded without having been shut down. */
__attribute__((destructor)) void client_leave(void)
{
    if (client >= 0)
        close(client);
    client = -1;
}

static bool other_clients(void)
{
    int file = client < 0 ? locked_file(".clients", LOCK_SH) : client;
    bool others = flock(file, LOCK_EX | LOCK_NB) < 0;
    /* A conversion that fails may have given the lock up. */
    flock(file, LOCK_SH);
    if (file != client)
        close(file);
    return others;
}

const struct board *board_of(const struct gpu *gpu)
{
    return &boards[gpu->board];
}

/* Whether it has not ended; one that only waits for its parent has closed its files. */
static bool alive(int pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *stat = fopen(path, "re");
    if (!stat)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, stat);
    fclose(stat);
    text[length] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] && name_end[2] != 'Z' && name_end[2] != 'X';
}

bool process_counts(const struct process *process)
{
    return !process->lives || alive(process->pid);
}

bool gpu_held(const struct gpu *gpu, int instance)
{
    return compute_held(gpu, instance, -1);
}

bool compute_held(const struct gpu *gpu, int instance, int compute)
{
    for (unsigned i = 0; i < gpu->process_count; i++) {
        const struct process *process = &gpu->processes[i];
        bool there = instance < 0 || process->instance < 0 || process->instance == instance;
        there = there && (compute < 0 || process->compute < 0 || process->compute == compute);
        /* Who only looks holds an instance whose capability it has open, and no more. */
        bool looks = process->use == USE_LOOK && process->instance < 0;
        if (there && !looks && process_counts(process))
            return true;
    }
    return false;
}

bool gpu_open(const struct gpu *gpu)
{
    for (unsigned i = 0; i < gpu->process_count; i++)
        if (process_counts(&gpu->processes[i]))
            return true;
    return other_clients();
}

void gpu_activate(struct gpu *gpu, unsigned mode)
{
    gpu->current = gpu->pending = mode;
    gpu->instance_count = 0;
    gpu->epoch++;
}

unsigned pci_bus(unsigned index)
{
    return 0x1b + 0xd * index;
}

int gpu_at(const char *address)
{
    unsigned domain = 0, bus = 0, device = 0, function = 0;
    char end;
    bool whole = sscanf(address, "%x:%x:%x.%x%c", &domain, &bus, &device, &function, &end) == 4;
    whole = whole || sscanf(address, "%x:%x:%x%c", &domain, &bus, &device, &end) == 3;
    if (!whole) {
        domain = 0;
        whole = sscanf(address, "%x:%x.%x%c", &bus, &device, &function, &end) == 3;
    }
    for (unsigned i = 0; whole && i < machine.gpu_count; i++)
        if (domain == 0 && bus == pci_bus(i) && device == 0 && function == 0)
            return (int)i;
    return -1;
}
