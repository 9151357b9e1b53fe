"""Network interfaces on several cards. moto knows an instance's interfaces by device index alone."""

from __future__ import annotations

from typing import Any

from moto.ec2.models.elastic_network_interfaces import Attachment, NetworkInterface
from moto.ec2.models.instances import Instance
from moto.ec2.responses.elastic_network_interfaces import ElasticNetworkInterfaces


def _is_first(nic: dict[str, Any]) -> bool:
    return int(nic.get("NetworkCardIndex") or 0) == 0 and int(nic.get("DeviceIndex") or 0) == 0


def install() -> None:
    attachment_init, prep_nics, terminate = Attachment.__init__, Instance.prep_nics, Instance.terminate
    create = ElasticNetworkInterfaces.create_network_interface

    def _attachment(self: Any, eni: Any) -> None:
        attachment_init(self, eni)
        self.network_card_index = getattr(eni, "network_card_index", 0)

    def _prep_nics(self: Any, nic_spec: list[dict[str, Any]], **options: Any) -> None:
        first = [nic for nic in nic_spec if _is_first(nic)]
        prep_nics(self, first, **options)
        primary = self.nics[0]
        _describe(primary, first[0] if first else {})
        for nic in nic_spec:
            if _is_first(nic):
                continue
            eni = self.ec2_backend.create_network_interface(
                self.ec2_backend.get_subnet(nic.get("SubnetId") or primary.subnet.id),
                None,
                group_ids=nic.get("Groups") or [group.id for group in primary._group_set],
                delete_on_termination=nic.get("DeleteOnTermination") is True,
                description=nic.get("Description"),
            )
            card, device = int(nic.get("NetworkCardIndex") or 0), int(nic["DeviceIndex"])
            # Under a key of its own, where moto would overwrite the interface of another card.
            self.attach_eni(eni, 1000 * card + device)
            eni.device_index = device
            _describe(eni, nic)
        # EC2 shows the groups of the first interface as those of the instance.
        self.security_groups = list(primary._group_set)

    def _terminate(self: Any) -> Any:
        previous = terminate(self)
        for eni in list(self.nics.values()):
            if not eni.delete_on_termination:
                eni.instance, eni.attachment_id, eni.attach_time, eni.status = None, None, None, "available"
        return previous

    def _create(self: Any) -> Any:
        result = create(self)
        kind = self._get_param("InterfaceType")
        if kind:
            result.result["NetworkInterface"].interface_type = kind
        return result

    Attachment.__init__ = _attachment
    Instance.prep_nics = _prep_nics
    Instance.terminate = _terminate
    NetworkInterface.group_set = property(lambda self: self._group_set)
    ElasticNetworkInterfaces.create_network_interface = _create


def _describe(eni: Any, nic: dict[str, Any]) -> None:
    eni.network_card_index = int(nic.get("NetworkCardIndex") or 0)
    eni.interface_type = nic.get("InterfaceType") or eni.interface_type
