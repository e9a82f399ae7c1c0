"""What people see: columns, screens, and the one writer to stdout."""
