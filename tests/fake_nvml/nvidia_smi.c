/* A stand-in for nvidia-smi that does one thing: nvidia-smi --gpu-reset -i ADDRESS[,ADDRESS...] */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "machine.h"

/* As nvidia-smi exits: 2 for what it does not understand, 3 for what the GPU cannot, 255 for everything else. */
enum { DONE = 0, USAGE = 2, CANNOT = 3, NO_GPU = 6, NO_DRIVER = 9, FAILED = 255 };

static void print_address(const char *before, int index, const char *after)
{
    printf("%s%08X:%02X:%02X.0%s", before, 0u, pci_bus((unsigned)index), 0u, after);
}

static int refuse_busy(const int *found, int count)
{
    int busy = 0;
    for (int i = 0; i < count; i++)
        busy += gpu_open(&machine.gpus[found[i]]);
    if (!busy)
        return DONE;
    puts("The following GPUs could not be reset:");
    for (int i = 0; i < count; i++)
        if (gpu_open(&machine.gpus[found[i]]))
            print_address("  GPU ", found[i], ": In use by another client\n");
    printf("\n%d device%s currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
           "graphics application such as an X server, or a monitoring application such as another instance of "
           "nvidia-smi). Please first kill all processes using %s and all compute applications running in the "
           "system.\n",
           busy, busy == 1 ? " is" : "s are", busy == 1 ? "this device" : "these devices");
    return FAILED;
}

/* All of them or none. */
static int reset(const int *found, int count)
{
    for (int i = 0; i < count; i++)
        if (machine.gpus[found[i]].guest) {
            print_address("Resetting GPU ", found[i], " is not supported.\n");
            return CANNOT;
        }
    int refused = refuse_busy(found, count);
    if (refused)
        return refused;
    for (int i = 0; i < count; i++) {
        struct gpu *gpu = &machine.gpus[found[i]];
        gpu_activate(gpu, gpu->pending);
        print_address("GPU ", found[i], " was successfully reset.\n");
    }
    puts("All done.");
    return machine_store() ? DONE : FAILED;
}

int main(int argc, char **argv)
{
    if (argc != 4 || strcmp(argv[1], "--gpu-reset") != 0 || strcmp(argv[2], "-i") != 0) {
        fputs("This stand-in understands only: nvidia-smi --gpu-reset -i ADDRESS[,ADDRESS...]\n", stderr);
        return USAGE;
    }
    if (env_on("FAKE_NVML_UNPRIVILEGED")) {
        puts("Unable to reset GPU: Insufficient Permissions");
        return 4;
    }
    if (!machine_open())
        return NO_DRIVER;
    int found[MAX_GPUS], count = 0;
    char *rest = NULL;
    for (char *address = strtok_r(argv[3], ",", &rest); address; address = strtok_r(NULL, ",", &rest)) {
        int index = gpu_at(address);
        if (index < 0 || count == MAX_GPUS) {
            printf("No devices were found: %s\n", address);
            return NO_GPU;
        }
        found[count++] = index;
    }
    return reset(found, count);
}
