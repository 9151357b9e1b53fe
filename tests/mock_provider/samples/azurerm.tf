terraform {
  required_providers {
    azurerm = {
      source  = "registry.terraform.io/hashicorp/azurerm"
      version = ">= 4.75"
    }
  }
}

provider "azurerm" {
  subscription_id = "00000000-0000-0000-0000-000000000000"

  features {
    persist_id_on_create_before_polling_for_completion = true
  }
}

resource "azurerm_resource_group" "this" {
  name     = "train"
  location = "westeurope"
}

resource "azurerm_virtual_network" "this" {
  name                = "train"
  location            = azurerm_resource_group.this.location
  resource_group_name = azurerm_resource_group.this.name
  address_space       = ["10.0.0.0/16"]
}

resource "azurerm_subnet" "this" {
  name                 = "train"
  resource_group_name  = azurerm_resource_group.this.name
  virtual_network_name = azurerm_virtual_network.this.name
  address_prefixes     = ["10.0.0.0/24"]
}

resource "azurerm_network_interface" "head" {
  name                = "train-0"
  location            = azurerm_resource_group.this.location
  resource_group_name = azurerm_resource_group.this.name

  ip_configuration {
    name                          = "main"
    subnet_id                     = azurerm_subnet.this.id
    private_ip_address_allocation = "Static"
    private_ip_address            = "10.0.0.4"
  }
}

resource "azurerm_linux_virtual_machine" "head" {
  name                  = "train-0"
  location              = azurerm_resource_group.this.location
  resource_group_name   = azurerm_resource_group.this.name
  size                  = "Standard_NC40ads_H100_v5"
  admin_username        = "azureuser"
  network_interface_ids = [azurerm_network_interface.head.id]
  custom_data           = base64encode("first")
  priority              = "Spot"
  eviction_policy       = "Delete"
  tags                  = { pool = "train" }
  # As Azure makes one that does not say it: it would be made anew otherwise.
  vtpm_enabled = true

  os_disk {
    caching              = "ReadWrite"
    storage_account_type = "Premium_LRS"
  }

  source_image_reference {
    publisher = "Canonical"
    offer     = "ubuntu-24_04-lts"
    sku       = "server"
    version   = "latest"
  }
}
