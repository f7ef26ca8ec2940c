"""Real faults from public issues, switched on in the emulated variants to prove that the gate catches them.

Nothing here is imported by a normal run: `service` imports it only in self-test mode, and a service with a fault
switched on says so in its fingerprint.
"""

from moe_kernels.faults.base import Fault, all_faults, fault, inject

__all__ = ["Fault", "all_faults", "fault", "inject"]
