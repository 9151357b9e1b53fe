"""Words of other tools for options and commands, and what they are here.

Of the YAML of SkyPilot and dstack, the decorators of Modal and Ray, the resources of Terraform and Kubernetes; commands
of these, of Docker and of Pulumi. And of the documents that the project was created from.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# By what takes the options: what to write here, and their words for it. The first that holds counts. In place of the
# number in <> stands the one that was given.
_WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "ComputePool": (
        ('accelerator="H100:8"', "gpu gpus gpu_type gpu_name accelerators accelerator_type tpu device resources"),
        ('accelerator="H100:8"', "gpu_count num_gpus gpus_per_node accelerator_count count"),
        ('accelerator="H100/3g.40gb"', "mig mig_profile mig_profiles partition partitions profile fraction"),
        ("vcpus=<8>", "cpu cpus num_cpus cores vcpu"),
        ("memory_gb=<64>, which are GB; others count MiB", "memory mem ram memory_mb memory_gib"),
        ("disk_gb=<200>", "disk disk_size storage volume_size"),
        ("nodes=<2>", "num_nodes node_count replicas workers num_workers min_nodes max_nodes instances size"),
        ('provider=sky.AWS(region="us-east-1")', "region regions cloud clouds infra backend backends location"),
        ('provider=sky.AWS(zones=["us-east-1a"])', "zone zones availability_zone availability_zones"),
        (
            'provider=sky.AWS(instance_types=["p5.48xlarge"])',
            "instance_type instance_types machine_type machine_types vm_size shape sku",
        ),
        ("spot=True", "use_spot spot_policy preemptible interruptible capacity_type"),
        ("max_hourly_cost=20.0", "max_price max_cost budget max_hourly_price bid price"),
        (
            'image=sky.Image(pip=["torch"])',
            "pip pip_install packages dependencies requirements apt apt_install python python_version preload",
        ),
        ('image=sky.Image(env={"NAME": "value"})', "env envs environment env_vars"),
        ('image=sky.Image(run=["..."])', "setup run commands"),
        ('provider=sky.AWS(ami="ami-...")', "image_id ami docker docker_image container"),
        ('labels={"team": "ml"}', "tags"),
        ("worker=sky.Worker(concurrency=2)", "concurrency max_concurrency slots"),
        ("@sky.compute(timeout=60)", "timeout timeout_seconds"),
        ("@sky.compute(retries=2)", "retries max_retries retry"),
        ('@sky.compute(secrets=["HF_TOKEN"])', "secret secrets"),
        ('sky.connect(..., workdir=".")', "workdir working_dir file_mounts mounts volumes"),
        ("`skyinfra port-forward STACK/POOL NODE PORT`", "ports port"),
        ('stack="train", for a pool that is used as a `with` block', "cluster cluster_name fleet"),
    ),
    "Image": (
        ('pip=["torch"]', "packages pip_install pip_packages dependencies requirements python_packages libraries uv"),
        ('apt=["git"]', "apt_install apt_packages system_packages debian_packages"),
        ('env={"NAME": "value"}', "envs environment env_vars environment_variables variables"),
        ('run=["..."]', "setup run_commands commands script setup_commands"),
        ('python="3.12"', "python_version"),
        ('index="https://..."', "index_url pip_index"),
        ('extra_indexes=["https://..."]', "extra_index_url extra_index_urls"),
        ('wheelhouse="https://..."', "find_links"),
        (
            'sky.GCP(image="..."), sky.AWS(ami="...")',
            "docker docker_image image image_id base container ami registry from_registry from_dockerfile debian_slim",
        ),
    ),
    "sky": (
        ("@sky.compute", "function remote task"),
        ("@sky.cls", "actor Cls Actor"),
        ("sky.FleetStack(app, ...)", "App Stub Cluster Stack"),
        ("sky.ComputePool(...)", "Compute Pool Resources Fleet"),
    ),
    "@sky.enter": (("@sky.enter, without arguments", "snap"),),
    "SpotCheckpointer": (
        ('path="/mnt/shared/run-7"', "checkpoint_dir ckpt_dir directory dir folder root"),
        ("sky.interrupted()", "should_stop interrupted preempted"),
        ("save(state, step)", "save_checkpoint checkpoint"),
        ("load_latest()", "load restore resume"),
    ),
    "SpotCheckpointer.save": (
        (
            'save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, step)',
            "* model optimizer epoch scheduler",
        ),
    ),
    "SpotCheckpointer.load_latest": (
        ('state, step = load_latest(); model.load_state_dict(state["model"])', "* model optimizer map_location"),
    ),
    "provider": (
        ('region="..."', "location datacenter regions"),
        ('zones=["..."]', "zone availability_zone availability_zones az"),
        ('zone="..."', "zones availability_zone availability_zones az"),
        ('instance_types=["..."]', "instance_type machine_type machine_types vm_size size shape sku"),
        ('ami="ami-..."', "image image_id"),
        ('image="..."', "ami image_id docker docker_image"),
        ('profile="..."', "aws_profile profile_name"),
        ('project="..."', "project_id"),
        ('project_id="..."', "project"),
        ('ssh_public_key="ssh-ed25519 ..."', "ssh_key key key_name key_pair public_key"),
        ('allow_cidrs=["203.0.113.7/32"]', "cidr cidrs allowed_cidrs ingress firewall"),
        ('subnet_ids=["..."]', "subnet subnets subnet_id"),
        ('vpc_id="..."', "vpc"),
        ('sky.ComputePool(accelerator="H100:8")', "accelerator accelerators gpu gpus gpu_type mig"),
        ("sky.ComputePool(spot=True)", "spot use_spot preemptible interruptible"),
        ("sky.ComputePool(nodes=2)", "nodes num_nodes node_count count"),
        ("sky.ComputePool(disk_gb=200)", "disk disk_gb disk_size"),
        ("sky.ComputePool(memory_gb=<64>), which are GB; others count MiB", "memory memory_gb ram"),
        ("sky.ComputePool(vcpus=<8>)", "cpu cpus vcpus num_cpus"),
        ('sky.ComputePool(labels={"team": "ml"})', "labels tags"),
        ("a variable of the environment: no declaration holds it", "token api_key access_key secret_key credentials"),
    ),
    "@sky.compute": (
        (
            'a slot of the pool, which has the GPUs; gpu_memory_gb=40, profile="3g.40gb" or slots=2 choose which',
            "gpu gpus num_gpus accelerator accelerators accelerator_type resources",
        ),
        ("gpu_memory_gb=40", "gpu_memory vram memory_gb"),
        ('profile="3g.40gb"', "mig mig_profile partition"),
        ("timeout=<60>", "timeout_s timeout_seconds time_limit max_runtime"),
        ("retries=<2>", "max_retries retry num_retries"),
        ('env={"NAME": "value"}', "envs environment env_vars runtime_env"),
        ('secrets=["HF_TOKEN"]', "secret"),
        ("sky.ComputePool(vcpus=<8>)", "cpu cpus num_cpus"),
        ("sky.ComputePool(memory_gb=<64>), which are GB; others count MiB", "memory mem ram memory_mb"),
        ("keep=2, objects that stay loaded on a slot", "enable_memory_snapshot experimental_options snap snapshot"),
        ('sky.ComputePool(image=sky.Image(pip=["torch"]))', "image pip packages dependencies"),
        ('sky.ComputePool(provider=sky.AWS(region="us-east-1"))', "region regions cloud provider"),
        ('sky.ComputePool(provider=sky.AWS(zones=["us-east-1a"]))', "zone zones availability_zone availability_zones"),
        (
            'sky.ComputePool(provider=sky.AWS(instance_types=["p5.48xlarge"]))',
            "instance_type instance_types machine_type machine_types vm_size",
        ),
        ("pool.launch(f, nodes=2)", "nodes num_nodes world_size num_workers"),
        ("sky.ComputePool(nodes=2)", "concurrency max_concurrency concurrency_limit max_containers"),
        ('sky.ComputePool(labels={"team": "ml"})', "labels tags"),
    ),
    "skyinfra": (
        ("skyinfra deploy", "up apply launch create start provision"),
        ("skyinfra destroy", "down delete remove rm stop terminate teardown kill"),
        ("skyinfra status", "ps ls list show describe info"),
        ("skyinfra plan", "diff preview dry-run"),
        ("skyinfra synth", "compile build validate"),
        ("skyinfra jobs", "job queue q submit cancel"),
        ("skyinfra run STACK/POOL SCRIPT --detach", "bg"),
        ("skyinfra offers", "offer show-gpus gpus gpu gpu-list prices catalog instances"),
        ("skyinfra recommend", "advise size"),
        ("skyinfra preflight", "check quota quotas"),
        ("skyinfra logs", "log tail"),
        ("skyinfra ssh", "attach shell connect login"),
        ("skyinfra put", "cp scp rsync upload push"),
        ("skyinfra get", "download pull"),
        ("skyinfra top", "stats metrics monitor"),
        ("skyinfra dashboard", "ui web"),
        ("skyinfra open jupyter", "notebook jupyter lab"),
        ("skyinfra manifest", "output outputs"),
        ("skyinfra --version", "version -v -V"),
        ("skyinfra deploy --yes", "-y --yes --auto-approve"),
        ("skyinfra --help", "help commands"),
    ),
}
# What takes options of tasks, besides the decorator.
_OF_TASKS = ("@sky.cls", "Task.options")
_NUMBER = re.compile(r"<(\d+)>")
# Where they are so many, others count MiB.
_MIB = {"memory", "mem", "ram", "memory_mb"}
_LEAST_MIB = 1024
# So many are bytes, which Ray counts.
_LEAST_BYTES = 2**26


def meant(name: str, of: str, known: Collection[str] | None = (), given: object = None) -> str:
    """Returns what to write for the option *name* of another tool, in a sentence; empty where that is not known.

    of: what was given it: ``ComputePool``, ``Image``, ``provider`` or a decorator. known: the options that this has;
    None where *name* is no option, but a command or an attribute; it is ``*`` where there were too many arguments.
    given: the value of the option.
    """
    number = given if isinstance(given, int | float) and given is not True and given > 0 else None
    for written, theirs in _WORDS.get("@sky.compute" if of in _OF_TASKS else of, ()):
        option = written.partition("=")[0]
        if name not in theirs.split() or (known is not None and option.isidentifier() and option not in known):
            continue
        if number is not None and name in _MIB and number >= _LEAST_MIB and _NUMBER.search(written):
            unit, size = ("bytes", 2**30) if number >= _LEAST_BYTES else ("MiB", 1024)
            ours = _NUMBER.sub(f"{number / size:.12g}", written.partition(",")[0])
            return f"{name}={number:.12g}, in {unit}, is {ours} here, in GB"
        written = _NUMBER.sub(r"\1" if number is None else f"{number:.12g}", written)
        if known is None:
            return f"It is, here: {written}"
        if not option.isidentifier():
            return f"{name}= is, here: {written}"
        return f"{name}= is {'part of ' if '=sky.' in written else ''}{option}= here: {written}"
    return ""
