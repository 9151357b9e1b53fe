/* fake-nvml-ctl: what happens to the machine that no driver does. See USAGE. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

static const char USAGE[] =
    "fake-nvml-ctl new MODEL[,MODEL...]   another machine, with these GPUs\n"
    "fake-nvml-ctl models                 which there are\n"
    "fake-nvml-ctl show                   the machine, as JSON\n"
    "fake-nvml-ctl reboot                 instances and processes go; MIG mode stays on Ampere only\n"
    "fake-nvml-ctl passthrough GPU        from now on the GPU is a virtual machine's, which cannot reset it\n"
    "fake-nvml-ctl hold GPU [--pid PID] [--start START [--compute AT]] [--graphics | --look] [--live]\n"
    "                                     a process computes on the GPU, or on the instance at START, or on the compute\n"
    "                                     instance that begins there at the compute slice AT; or draws; or only\n"
    "                                     has it open, as a monitor does, listed nowhere; with --live for as long as it runs\n"
    "fake-nvml-ctl release GPU [--pid PID]   it is no longer; without a PID, all of them\n";

/* argv[at] as a number from 0 to below the limit; ends the program where it is none. */
static int number(int argc, char **argv, int at, int limit)
{
    char *end = NULL;
    long value = at < argc ? strtol(argv[at], &end, 10) : -1;
    if (!end || *end || value < 0 || value >= limit) {
        fprintf(stderr, "fake-nvml-ctl: expected a number below %d, got %s\n", limit, at < argc ? argv[at] : "nothing");
        exit(2);
    }
    return (int)value;
}

static struct gpu *gpu_argument(int argc, char **argv)
{
    return &machine.gpus[number(argc, argv, 2, (int)machine.gpu_count)];
}

static int instance_at(const struct gpu *gpu, unsigned start)
{
    for (unsigned i = 0; i < gpu->instance_count; i++)
        if (gpu->instances[i].start == start)
            return (int)gpu->instances[i].id;
    fprintf(stderr, "fake-nvml-ctl: there is no instance at %u\n", start);
    exit(1);
}

static int compute_at(const struct gpu *gpu, int id, unsigned start)
{
    for (unsigned i = 0; i < gpu->instance_count; i++)
        for (unsigned j = 0; (int)gpu->instances[i].id == id && j < gpu->instances[i].compute_count; j++)
            if (gpu->instances[i].compute[j].start == start)
                return (int)gpu->instances[i].compute[j].id;
    fprintf(stderr, "fake-nvml-ctl: no compute instance begins at %u\n", start);
    exit(1);
}

static int hold(int argc, char **argv)
{
    struct gpu *gpu = gpu_argument(argc, argv);
    struct process process = {.pid = 4242, .instance = -1, .compute = -1};
    for (int i = 3; i < argc; i++) {
        if (strcmp(argv[i], "--pid") == 0)
            process.pid = number(argc, argv, ++i, 1 << 30);
        else if (strcmp(argv[i], "--start") == 0)
            process.instance = instance_at(gpu, (unsigned)number(argc, argv, ++i, 16));
        else if (strcmp(argv[i], "--compute") == 0)
            process.compute = compute_at(gpu, process.instance, (unsigned)number(argc, argv, ++i, 16));
        else if (strcmp(argv[i], "--graphics") == 0)
            process.use = USE_GRAPHICS;
        else if (strcmp(argv[i], "--look") == 0)
            process.use = USE_LOOK;
        else if (strcmp(argv[i], "--live") == 0)
            process.lives = true;
        else
            return 2;
    }
    if (gpu->process_count == MAX_PROCESSES) {
        fputs("fake-nvml-ctl: too many processes\n", stderr);
        return 1;
    }
    gpu->processes[gpu->process_count++] = process;
    return 0;
}

static int release(int argc, char **argv)
{
    struct gpu *gpu = gpu_argument(argc, argv);
    bool one = argc == 5 && strcmp(argv[3], "--pid") == 0;
    int pid = one ? number(argc, argv, 4, 1 << 30) : 0;
    unsigned kept = 0;
    if (!one && argc != 3)
        return 2;
    for (unsigned i = 0; i < gpu->process_count; i++)
        if (one && gpu->processes[i].pid != pid)
            gpu->processes[kept++] = gpu->processes[i];
    gpu->process_count = kept;
    return 0;
}

static void reboot_machine(void)
{
    for (unsigned i = 0; i < machine.gpu_count; i++) {
        struct gpu *gpu = &machine.gpus[i];
        gpu_activate(gpu, board_of(gpu)->resetless ? 0 : gpu->pending);
        gpu->process_count = 0;
    }
}

static void show_instance(const struct gpu *gpu, const struct instance *instance)
{
    const struct profile *profile = &board_of(gpu)->profiles[instance->profile];
    printf("{\"profile\": \"%s\", \"id\": %u, \"start\": %u, \"size\": %u, \"compute\": [", profile->name, instance->id,
           instance->start, instance->size);
    for (unsigned i = 0; i < instance->compute_count; i++)
        printf("%s{\"id\": %u, \"slices\": %u, \"start\": %u}", i ? ", " : "", instance->compute[i].id,
               instance->compute[i].slices, instance->compute[i].start);
    printf("]}");
}

static void show_gpu(const struct gpu *gpu)
{
    printf("  {\"model\": \"%s\", \"current\": %u, \"pending\": %u, \"guest\": %s, \"instances\": [",
           board_of(gpu)->model, gpu->current, gpu->pending, gpu->guest ? "true" : "false");
    for (unsigned i = 0; i < gpu->instance_count; i++) {
        printf("%s", i ? ", " : "");
        show_instance(gpu, &gpu->instances[i]);
    }
    printf("], \"processes\": [");
    for (unsigned i = 0; i < gpu->process_count; i++)
        printf("%s{\"pid\": %d, \"instance\": %d}", i ? ", " : "", gpu->processes[i].pid, gpu->processes[i].instance);
    printf("]}");
}

static int show(void)
{
    puts("{\"gpus\": [");
    for (unsigned i = 0; i < machine.gpu_count; i++) {
        show_gpu(&machine.gpus[i]);
        puts(i + 1 < machine.gpu_count ? "," : "");
    }
    puts("]}");
    return 0;
}

static int models(void)
{
    for (unsigned i = 0; i < board_count; i++)
        puts(boards[i].model);
    return 0;
}

static int run(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "show") == 0 && argc == 2)
        return show();
    if (strcmp(command, "hold") == 0)
        return hold(argc, argv);
    if (strcmp(command, "release") == 0)
        return release(argc, argv);
    if (strcmp(command, "new") == 0 && argc == 3)
        return machine_make(argv[2]) ? 0 : 1;
    if (strcmp(command, "passthrough") == 0 && argc == 3) {
        gpu_argument(argc, argv)->guest = true;
        return 0;
    }
    if (strcmp(command, "reboot") == 0 && argc == 2) {
        reboot_machine();
        return 0;
    }
    return 2;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "models") == 0)
        return models();
    if (!machine_open())
        return 1;
    int result = run(argc, argv);
    if (result == 2)
        fputs(USAGE, stderr);
    return result == 0 && !machine_store() ? 1 : result;
}
