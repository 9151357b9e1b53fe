"""A stack that a real terraform carries out, a program that applies one, and what AWS says when it refuses."""

from __future__ import annotations

from skyinfra.terraform.program import Terraform
from skyinfra.terraform.text import Event

SIMPLE = """
variable "value" { default = "one" }
resource "terraform_data" "a" { input = var.value }
resource "terraform_data" "secret" { triggers_replace = sensitive("s3cret-value") }
output "a" { value = terraform_data.a.output }
output "secret" {
  value     = terraform_data.secret.triggers_replace
  sensitive = true
}
"""

# A program that applies what is in a folder, and says how it was interrupted.
APPLY = """
import sys
from pathlib import Path
import skyinfra as sky
from skyinfra.terraform.program import Terraform
terraform = Terraform(Path(sys.argv[1]))
terraform.prepare()
try:
    with terraform.planned(lambda e: None) as plan:
        terraform.apply_plan(plan, lambda e: None)
except sky.DeployInterrupted as error:
    print(error)
    sys.exit(error.exit_code)
"""
FAILED = "creating EC2 Instance: operation error EC2: RunInstances, "
NO_CAPACITY = (
    f"{FAILED}exceeded maximum number of attempts, 25, https response error StatusCode: 500, RequestID: r-1, api error "
    "InsufficientInstanceCapacity: We currently do not have sufficient p5.48xlarge capacity in the Availability Zone "
    "you requested (us-east-1a). Our system will be working on provisioning additional capacity. You can currently get "
    "p5.48xlarge capacity by not specifying an Availability Zone in your request or choosing us-east-1b, us-east-1d."
)


def carry_out_all(stack: Terraform) -> list[Event]:
    """Plan, apply, outputs, replace and destroy of `SIMPLE`, or of what is the same; the events of it."""
    events: list[Event] = []
    assert stack.outputs() == {}
    with stack.planned(events.append) as plan:
        assert set(plan.changes) == {("create", "terraform_data.a"), ("create", "terraform_data.secret")}
        stack.apply_plan(plan, events.append)
    assert {e.address for e in events if e.kind == "done"} == {"terraform_data.a", "terraform_data.secret"}
    assert stack.outputs() == {"a": "one", "secret": "s3cret-value"}
    with stack.planned(events.append) as plan:
        assert plan.empty
    with stack.planned(events.append, replace=["terraform_data.a"]) as plan:
        assert plan.changes == (("replace", "terraform_data.a"),)
    with stack.planned(events.append, destroy=True) as plan:
        assert {action for action, _ in plan.changes} == {"delete"} and len(plan.changes) == 2
        stack.apply_plan(plan, events.append)
    assert stack.outputs() == {}
    assert not any("s3cret" in str(event) or "\x1b" in str(event) for event in events)
    return events
