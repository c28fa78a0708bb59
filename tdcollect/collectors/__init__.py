"""TorchRL's collectors on several processes and machines, with tdcollect's collector inside."""
