locals {
  tags = merge(var.labels, { "skyinfra-stack" = var.stack, "skyinfra-pool" = var.name })
  user = "ubuntu"
  # Of the subnet Azure keeps the first four. A head that is made anew has the address that its workers know.
  subnet = "10.0.0.0/20"
  inside = { for index in range(var.node_count) : "${var.name}-${index}" => cidrhost(local.subnet, 4 + index) }

  resource_group = var.resource_group == null ? azurerm_resource_group.pool[0].name : var.resource_group
  # PUBLISHER:OFFER:SKU:VERSION, or the id of an image.
  image = split(":", var.image)
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

# The host key of each machine.
resource "tls_private_key" "host" {
  for_each  = module.hosts.names.nodes
  algorithm = "ED25519"
}

module "hosts" {
  source    = "../hosts"
  kind      = "azure"
  secret    = terraform_data.secret
  account   = try(split("/", azurerm_linux_virtual_machine.node["${var.name}-0"].id)[2], null)
  zone      = coalesce(var.zone, var.region)
  ids       = { for node, machine in azurerm_linux_virtual_machine.node : node => machine.virtual_machine_id }
  machines  = { for node, address in azurerm_public_ip.node : node => { address = address.ip_address, inside = local.inside[node], user = local.user, key_file = var.key_file } }
  host_keys = tls_private_key.host
  # https://learn.microsoft.com/en-us/azure/azure-resource-manager/management/resource-name-rules: virtualMachines 1-64 (Linux)
  names = { limit = 64 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key, allow_cidrs = var.allow_cidrs
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

resource "azurerm_resource_group" "pool" {
  count    = var.resource_group == null ? 1 : 0
  name     = module.hosts.names.own
  location = var.region
  tags     = local.tags

  lifecycle { ignore_changes = [name] }
}

resource "azurerm_virtual_network" "pool" {
  name                = module.hosts.names.own
  location            = var.region
  resource_group_name = local.resource_group
  address_space       = [local.subnet]
  tags                = local.tags

  lifecycle { ignore_changes = [name] }
}

resource "azurerm_subnet" "pool" {
  name                 = "nodes"
  resource_group_name  = local.resource_group
  virtual_network_name = azurerm_virtual_network.pool.name
  address_prefixes     = [local.subnet]
}

# Azure's own rules let the nodes reach each other and the outside, and nobody in.
resource "azurerm_network_security_group" "pool" {
  name                = module.hosts.names.own
  location            = var.region
  resource_group_name = local.resource_group
  tags                = local.tags

  lifecycle { ignore_changes = [name] }
}

resource "azurerm_network_security_rule" "from_outside" {
  name                        = "skyinfra"
  resource_group_name         = local.resource_group
  network_security_group_name = azurerm_network_security_group.pool.name
  priority                    = 100
  direction                   = "Inbound"
  access                      = "Allow"
  protocol                    = "Tcp"
  source_port_range           = "*"
  source_address_prefixes     = var.allow_cidrs
  destination_port_ranges     = ["22", tostring(var.scheduler_port)]
  destination_address_prefix  = "*"
}

resource "azurerm_subnet_network_security_group_association" "pool" {
  subnet_id                 = azurerm_subnet.pool.id
  network_security_group_id = azurerm_network_security_group.pool.id
}

resource "azurerm_public_ip" "node" {
  for_each = module.hosts.names.nodes

  name                = each.value
  location            = var.region
  resource_group_name = local.resource_group
  allocation_method   = "Static"
  zones               = var.zone == null ? null : [var.zone]
  tags                = local.tags

  lifecycle { ignore_changes = [name] }
}

resource "azurerm_network_interface" "node" {
  for_each = module.hosts.names.nodes

  name                           = each.value
  location                       = var.region
  resource_group_name            = local.resource_group
  accelerated_networking_enabled = var.accelerated_networking
  tags                           = local.tags

  ip_configuration {
    name                          = "main"
    subnet_id                     = azurerm_subnet.pool.id
    private_ip_address_allocation = "Static"
    private_ip_address            = local.inside[each.key]
    public_ip_address_id          = azurerm_public_ip.node[each.key].id
  }

  lifecycle {
    ignore_changes = [name]
    # Azure deletes no address that an interface has.
    replace_triggered_by = [azurerm_public_ip.node[each.key].id]
  }
}

# InfiniBand connects machines of one availability set, which takes no spot machines and stands in no zone.
# https://learn.microsoft.com/en-us/azure/virtual-machine-scale-sets/virtual-machine-scale-sets-orchestration-modes
resource "azurerm_availability_set" "pool" {
  count = var.infiniband ? 1 : 0

  name                         = module.hosts.names.own
  location                     = var.region
  resource_group_name          = local.resource_group
  platform_fault_domain_count  = 1
  platform_update_domain_count = 1
  tags                         = local.tags

  lifecycle {
    ignore_changes = [name]
    precondition {
      condition     = !var.spot && var.zone == null && can(regex("^Standard_N[A-Z]+[0-9]+[a-qs-z]*r", var.machine_types[0]))
      error_message = "infiniband: for sizes with an r behind the number (Standard_ND96isr_H100_v5), which are no spot machines and stand in no zone."
    }
  }
}

# What would be changed in place, for which a machine is stopped.
resource "terraform_data" "machine" {
  input = [var.machine_types[0], var.disk_gb]
}

resource "azurerm_linux_virtual_machine" "node" {
  for_each = module.hosts.names.nodes

  name                  = each.value
  computer_name         = each.key
  location              = var.region
  resource_group_name   = local.resource_group
  zone                  = var.zone
  availability_set_id   = one(azurerm_availability_set.pool[*].id)
  size                  = var.machine_types[0]
  network_interface_ids = [azurerm_network_interface.node[each.key].id]
  admin_username        = local.user
  custom_data           = base64encode(module.hosts.cloud_config[each.key])
  priority              = var.spot ? "Spot" : "Regular"
  eviction_policy       = var.spot ? "Delete" : null
  source_image_id       = length(local.image) == 1 ? var.image : null
  # Drivers that are built on the machine are not signed. Of false the provider sends nothing: Azure decides.
  secure_boot_enabled = false
  tags                = local.tags

  admin_ssh_key {
    username   = local.user
    public_key = trimspace(var.ssh_public_key)
  }

  os_disk {
    caching              = "ReadWrite"
    storage_account_type = "Premium_LRS"
    disk_size_gb         = var.disk_gb == 0 ? 128 : var.disk_gb
  }

  dynamic "source_image_reference" {
    for_each = length(local.image) == 4 ? [local.image] : []
    content {
      publisher = source_image_reference.value[0]
      offer     = source_image_reference.value[1]
      sku       = source_image_reference.value[2]
      version   = source_image_reference.value[3]
    }
  }

  lifecycle {
    # A key that is changed is for machines that are made later. Where Azure took trusted launch by itself, the provider
    # reads that both are on, and would make each machine anew with every plan.
    ignore_changes       = [name, custom_data, admin_ssh_key, secure_boot_enabled, vtpm_enabled]
    replace_triggered_by = [terraform_data.machine, tls_private_key.host[each.key]]
  }

  # Nothing reaches a machine that the rules do not let in.
  depends_on = [azurerm_subnet_network_security_group_association.pool, azurerm_network_security_rule.from_outside]
}
