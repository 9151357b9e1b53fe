"""`FleetStack`: the pools of a program as a Terraform stack of cdktf or cdktn."""

from skyinfra.stack.constructs import LIBRARIES, FleetStack, check_name, load_library, modules_folder
from skyinfra.stack.sections import describe, module_inputs

__all__ = [
    "LIBRARIES",
    "FleetStack",
    "check_name",
    "describe",
    "load_library",
    "module_inputs",
    "modules_folder",
]
