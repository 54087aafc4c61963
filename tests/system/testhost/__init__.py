"""Throw-away Debian 12 hosts with a real systemd as PID 1, made of namespaces (`host.Host`) or with a kernel of their
own (`uml.UmlHost`). No Docker, no KVM, no systemd on this machine: root, overlayfs, loop devices, debootstrap once.

How it holds together:

* one folder per host, TESTHOST_DIR/hosts/NAME, with disk.img: a sparse ext4 that holds the overlay's upper folder
  (lower = committed layers and the shared base).
* one supervisor process per host that is on. It owns a private mount and a network namespace; the guest's PID 1 is its
  grandchild, in further namespaces. When the supervisor goes, so do guest, mounts, loop devices and the veth pair.
* the guest's cgroups are children of the caller's own, in every hierarchy.
* a guest is root without a user namespace: contained against accidents, not against malice. It has no way out of this
  machine, and reaches nothing of this machine either.
"""
