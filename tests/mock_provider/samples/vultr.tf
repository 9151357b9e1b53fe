terraform {
  required_providers {
    vultr = {
      source  = "registry.terraform.io/vultr/vultr"
      version = ">= 2.32"
    }
  }
}

resource "vultr_vpc" "this" {
  region = "ewr"
}

resource "vultr_firewall_group" "this" {
  description = "train"
}

resource "vultr_firewall_rule" "scheduler" {
  firewall_group_id = vultr_firewall_group.this.id
  protocol          = "tcp"
  ip_type           = "v4"
  subnet            = "198.51.100.0"
  subnet_size       = 24
  port              = "8786"
}

resource "vultr_instance" "head" {
  region            = "ewr"
  plan              = "vcg-a16-2c-8g-2vram"
  os_id             = 2284
  label             = "train-0"
  user_data         = "first"
  firewall_group_id = vultr_firewall_group.this.id
  vpc_ids           = [vultr_vpc.this.id]
}
