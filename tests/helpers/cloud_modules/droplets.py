"""Two droplets in a network, in Terraform's language: for a Terraform provider made of the schema of DigitalOcean's."""

from __future__ import annotations

REQUIRED = """
terraform {
  required_providers {
    digitalocean = { source = "registry.terraform.io/digitalocean/digitalocean" }
  }
}
"""
PROVIDER = """
provider "digitalocean" {
  token = "t"
}
"""


def droplets(more: str = "") -> str:
    """Returns the network and the droplets. more: what stands in the block of the droplets besides."""
    return f"""
resource "digitalocean_vpc" "this" {{
  name   = "train"
  region = "tor1"
}}
resource "digitalocean_droplet" "node" {{
  count     = 2
  name      = "train-${{count.index}}"
  image     = "gpu-h100x8-base"
  region    = "tor1"
  size      = "gpu-h100x1-80gb"
  vpc_uuid  = digitalocean_vpc.this.id
{more}}}
"""
