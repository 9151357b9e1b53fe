# The inputs of every provider come first; ../core checks them.

variable "name" {
  description = "Name of the pool. Nodes are named NAME-0, NAME-1, ...; NAME-0 is the head. Where the workers are a machine group, the head is NAME-head."
  type        = string
  nullable    = false
}

variable "stack" {
  description = "Name of the stack the pool belongs to; recorded in the manifest and on what the module makes."
  type        = string
  default     = "default"
  nullable    = false
}

variable "node_count" {
  description = "Number of nodes that carry slots. The head is one of them, unless the workers are a machine group: then the head is a machine besides them."
  type        = number
  default     = 1
  nullable    = false
}

variable "min_nodes" {
  description = "The least number of nodes, where the head raises it as the work asks for it, nodes without a task end, and node_count is the most; the head is then a machine besides them. Null: it is fixed. With an iam_instance_profile of your own, its role needs autoscaling:SetDesiredCapacity and autoscaling:TerminateInstanceInAutoScalingGroup on the group. It changes in place."
  type        = number
  default     = null

  validation {
    condition     = var.min_nodes == null || try(var.min_nodes >= 0 && floor(var.min_nodes) == var.min_nodes, false)
    error_message = "min_nodes: a whole number of at least 0."
  }
}

variable "user_data_head" {
  description = "User data of the head, not compressed. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT, @SKYINFRA_BUCKET@ the address at which `secret` and `versions.json` stand, @SKYINFRA_RUNNER@ that of the runner, @SKYINFRA_VOLUME@ the id of the volume with the jobs of the head. @SKYINFRA_SECRET@ becomes the fleet secret itself, which then is read by whoever may read the user data."
  type        = string
  nullable    = false
}

variable "user_data_worker" {
  description = "User data of the other nodes, with the same placeholders, but @SKYINFRA_VOLUME@. The nodes of a machine group share one text, in which @SKYINFRA_NODE@ becomes the group's name."
  type        = string
  default     = ""
  nullable    = false
}

variable "user_data_revision" {
  description = "What changes when nodes must be replaced for their user data. Null does so for every change of it; a revision computed from what is declared, without the layout, lets a layout change in place."
  type        = string
  default     = null
}

variable "shutdown_terminates" {
  description = "Whether an instance that shuts itself down is terminated, as nodes do that end when nothing has used them, or when their lifetime is over. A group may shrink to nothing then, and its nodes may have it terminate them: an iam_instance_profile of your own needs autoscaling:TerminateInstanceInAutoScalingGroup for that. It changes in place."
  type        = bool
  default     = false
  nullable    = false
}

variable "slots" {
  description = "The slots of each node, for the manifest. kind: partition, gpu, chip, cores, host, cpu."
  type        = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
  default     = []
  nullable    = false
}

variable "runner_file" {
  description = "A file that the nodes install at their first boot: the runner as a wheel. The first one is kept: another changes nothing. Empty where the user data need none."
  type        = string
  default     = ""
  nullable    = false
}

variable "versions" {
  description = "The versions that the nodes install, for `versions.json`: of Python where none is declared, and of packages that client and workers share. The first ones are kept: others change nothing. Null where the user data need none."
  type        = object({ python = string, requirements = list(string) })
  default     = null
}

variable "scheduler_port" {
  description = "The port of the head that the scheduler listens on, as user_data_head says. Another one replaces all nodes: it stands in what they were made from."
  type        = number
  default     = 8786
  nullable    = false
}

variable "machine_types" {
  description = "EC2 instance types in order of preference. More than one, or spot with more than one node, makes the workers an Auto Scaling group."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.machine_types) > 0 && length(distinct(var.machine_types)) == length(var.machine_types)
    error_message = "machine_types: at least one instance type, none of them twice."
  }

  validation {
    condition     = alltrue([for type in var.machine_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", type))])
    error_message = "machine_types: EC2 instance types, such as p5.48xlarge."
  }
}

variable "image" {
  description = "Machine image: an AMI id, or the path of an SSM parameter that holds one (/aws/service/...). The AMI found at first is kept until this input changes."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
  nullable    = false

  validation {
    condition     = can(regex("^(ami-[0-9a-z]+|/[A-Za-z0-9_./-]+)$", var.image))
    error_message = "image: an AMI id (ami-...), or the path of an SSM parameter (/aws/service/...)."
  }
}

variable "disk_gb" {
  description = "Root volume of a node in GiB (encrypted gp3); 0 takes the size of the image."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb >= 0 && var.disk_gb <= 65536 && floor(var.disk_gb) == var.disk_gb
    error_message = "disk_gb: a whole number from 1 to 65536, or 0 for the size of the image."
  }
}

variable "spot" {
  description = "Whether the nodes are spot instances. The head of an Auto Scaling group is on-demand all the same."
  type        = bool
  default     = false
  nullable    = false
}

variable "ssh_public_key" {
  description = "OpenSSH public key to log in with; empty for none. Session Manager works without one."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.ssh_public_key == "" || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", trimspace(var.ssh_public_key)))
    error_message = "ssh_public_key: one line, beginning with ssh-ed25519 or ssh-rsa, which are the kinds EC2 takes."
  }
}

variable "allow_cidrs" {
  description = "Networks that may reach the head's scheduler, and its port 22 where ssh_public_key is given. Nothing else comes in. Known when Terraform plans: a rule has its network in its name."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.allow_cidrs : can(cidrhost(cidr, 0))])
    error_message = "allow_cidrs: networks in CIDR notation, such as 203.0.113.7/32."
  }

  validation {
    # Compared as addresses: an IPv6 network can be written in several ways.
    condition = alltrue([
      for cidr in var.allow_cidrs : try(cidrhost(cidr, 0) == cidrhost("${split("/", cidr)[0]}/${can(regex(":", cidr)) ? 128 : 32}", 0), true)
    ])
    error_message = "allow_cidrs: the first address of a network, with its length: 203.0.113.7/32 for one address, 203.0.113.0/24 for its network."
  }
}

variable "labels" {
  description = "Labels; tags on everything the module creates, volumes and network interfaces included."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    # The metadata service shows the tags of an instance by their keys, so EC2 refuses spaces and slashes there; S3 and
    # IAM refuse commas.
    condition = alltrue([
      for key in keys(var.labels) : can(regex("^[A-Za-z0-9+=._:@-]{1,128}$", key)) && !can(regex("^((?i:aws:|skyinfra:)|Name$|\\.{1,2}$|_index$)", key))
    ])
    error_message = "labels: names of letters, digits and + - = . _ : @, at most 128 characters; not Name, and not beginning with aws: or skyinfra:, which are taken."
  }

  validation {
    condition     = alltrue([for value in values(var.labels) : can(regex("^[\\p{L}\\p{N} +=._:/@-]{0,256}$", value))])
    error_message = "labels: values of letters, digits, spaces and + - = . _ : / @, at most 256 characters."
  }

  validation {
    condition     = length(var.labels) <= 40
    error_message = "labels: at most 40; AWS takes 50 tags, and some are the module's own."
  }
}

# What AWS adds. The region and the credentials are those of the provider that the caller passes.

variable "group" {
  description = "Whether the workers are an Auto Scaling group. Null decides by what is declared: several machine types, or spot with several nodes. Set it to true for a spot pool that begins with one node, which grows and shrinks without being replaced then."
  type        = bool
  default     = null
}

variable "zones" {
  description = "Availability Zones to use, in order of preference; empty means all that offer the machine types. Instances stand in the first one and stay there, an Auto Scaling group in all."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for zone in var.zones : can(regex("^[a-z]{2,4}(-[a-z]+)+-[0-9][a-z]$", zone))]) && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones: names of Availability Zones, such as us-east-1a, none of them twice. For Local Zones give subnet_ids."
  }
}

variable "vpc_id" {
  description = "The VPC that subnet_ids belong to. Null makes a VPC, or takes that of subnet_ids."
  type        = string
  default     = null
}

variable "vpc_cidr" {
  description = "Addresses of the VPC that the module makes; not used with subnet_ids."
  type        = string
  default     = "10.83.0.0/16"
  nullable    = false

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.vpc_cidr)[1]), 99) <= 24
    error_message = "vpc_cidr: an IPv4 network of /16 to /24, such as 10.83.0.0/16."
  }
}

variable "subnet_ids" {
  description = "Subnets to stand in, instead of a network of the module's own. They need a way to the internet, or endpoints and mirrors in its place."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "security_group_ids" {
  description = "Security groups of the nodes, instead of the module's own. Members must be able to reach each other on every port. Needs subnet_ids."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.security_group_ids) <= 5
    error_message = "security_group_ids: at most 5, which is what a network interface takes."
  }
}

variable "head_public_ip" {
  description = "Whether the head has an Elastic IP in subnet_ids. In a network of the module's own it always has one."
  type        = bool
  default     = false
  nullable    = false
}

variable "iam_instance_profile" {
  description = "Name of the instance profile of the nodes. Null makes one that allows Session Manager and nothing else."
  type        = string
  default     = null
}

variable "iam_path" {
  description = "Path of the role and the instance profile that the module makes."
  type        = string
  default     = "/"
  nullable    = false

  validation {
    condition     = can(regex("^/([!-~]+/)?$", var.iam_path))
    error_message = "iam_path: begins and ends with a slash, such as /skyinfra/."
  }
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds the role that the module makes; null for none."
  type        = string
  default     = null
}

variable "kms_key_id" {
  description = "ARN of the KMS key that encrypts the volumes and the pool's bucket; null takes the keys that AWS manages. The volume with the jobs keeps the key that it was made with. The account's EC2 Auto Scaling role must be allowed to use it."
  type        = string
  default     = null
}

variable "volumes" {
  description = "EBS volumes that are there already and outlive the fleet, attached to its only node, in their order: the user data mount them at their paths. They are in the zone of the node. At most 8; a machine group has none."
  type        = list(object({ name = string, id = string, path = optional(string) }))
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for volume in var.volumes : can(regex("^vol-[0-9a-z]+$", volume.id))])
    error_message = "volumes: the id of an EBS volume is such as vol-0123456789abcdef0."
  }
}

variable "buckets" {
  description = "What the user data mount of buckets, which are there already: the module's role may read it below the prefix, and write it where `write` says so. With iam_instance_profile the rights are those of that role."
  type        = list(object({ bucket = string, prefix = optional(string, ""), write = optional(bool, false) }))
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for each in var.buckets : can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", each.bucket)) && !can(regex("(^/|/$|[*?$])", each.prefix))])
    error_message = "buckets: the name of a bucket has 3 to 63 lower-case letters, digits, dots and hyphens; a prefix begins and ends without a slash."
  }
}

variable "head_volume_gb" {
  description = "The volume with the jobs of the head in GiB (encrypted gp3), which outlives a head that is replaced. It may only grow; the head takes the room at its next boot."
  type        = number
  default     = 20
  nullable    = false

  validation {
    condition     = var.head_volume_gb >= 1 && var.head_volume_gb <= 16384 && floor(var.head_volume_gb) == var.head_volume_gb
    error_message = "head_volume_gb: a whole number from 1 to 16384."
  }
}

variable "head_machine_type" {
  description = "Instance type of the head where the workers are an Auto Scaling group: on-demand and without slots. Must have the architecture of head_image."
  type        = string
  default     = "m6i.large"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", var.head_machine_type))
    error_message = "head_machine_type: an EC2 instance type, such as m6i.large."
  }
}

variable "head_image" {
  description = "Image of that head, written like `image`; null takes the image of the nodes."
  type        = string
  default     = null

  validation {
    condition     = var.head_image == null || can(regex("^(ami-[0-9a-z]+|/[A-Za-z0-9_./-]+)$", coalesce(var.head_image, "-")))
    error_message = "head_image: an AMI id (ami-...), or the path of an SSM parameter (/aws/service/...)."
  }
}

variable "spot_max_price" {
  description = "The most to pay for a spot instance, in USD per hour; null means the on-demand price. Needs spot."
  type        = number
  default     = null

  validation {
    condition     = var.spot_max_price == null || coalesce(var.spot_max_price, 0) > 0
    error_message = "spot_max_price: more than 0 USD per hour, or null for no limit but the on-demand price."
  }
}

variable "capacity_block_id" {
  description = "Id of a capacity block (cr-...) that the nodes run in."
  type        = string
  default     = null

  validation {
    condition     = var.capacity_block_id == null || can(regex("^cr-[0-9a-z]+$", coalesce(var.capacity_block_id, "-")))
    error_message = "capacity_block_id: the id of the reservation that the block was bought as, cr-..."
  }
}

variable "capacity_reservation_id" {
  description = "Id of an on-demand capacity reservation (cr-...) that the nodes run in."
  type        = string
  default     = null

  validation {
    condition     = var.capacity_reservation_id == null || can(regex("^cr-[0-9a-z]+$", coalesce(var.capacity_reservation_id, "-")))
    error_message = "capacity_reservation_id: the id of a capacity reservation, cr-..."
  }
}

variable "efa_interfaces" {
  description = "The network interfaces of a node, by machine type, for EFA: network card, device index (0 on card 0, 1 on the others), interface type (efa, efa-only, interface). A machine type left out has one plain interface."
  type = map(list(object({
    network_card   = number
    device_index   = number
    interface_type = string
  })))
  default  = {}
  nullable = false

  validation {
    condition = alltrue(flatten([
      for interfaces in values(var.efa_interfaces) : [
        for interface in interfaces : contains(["efa", "efa-only", "interface"], interface.interface_type)
      ]
    ]))
    error_message = "efa_interfaces: the interface type is efa, efa-only or interface."
  }

  validation {
    condition = alltrue([
      for interfaces in values(var.efa_interfaces) : length(interfaces) > 0 && length(distinct([for i in interfaces : "${i.network_card}/${i.device_index}"])) == length(interfaces)
    ])
    error_message = "efa_interfaces: at least one interface for a machine type, and no card and device index twice."
  }

  validation {
    # The first one has the node's address.
    condition = alltrue([
      for interfaces in values(var.efa_interfaces) : try(interfaces[0].network_card == 0 && interfaces[0].device_index == 0 && interfaces[0].interface_type != "efa-only", false)
    ])
    error_message = "efa_interfaces: the first interface is device 0 of card 0 and carries the node's address, so it is efa or interface."
  }
}

variable "placement_group" {
  description = "Whether the nodes stand in a cluster placement group, which is in one zone. The head of an Auto Scaling group does not."
  type        = bool
  default     = false
  nullable    = false
}

variable "layout" {
  description = "The wanted layout as a short text: the tag skyinfra:layout of the head, which the head reads through the metadata service. Changing it changes that tag and nothing else. Empty for no tag."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^[\\p{L}\\p{N} +=._:/@-]{0,256}$", var.layout))
    error_message = "layout: letters, digits, spaces and + - = . _ : / @, at most 256 characters, which is what a tag takes."
  }
}
