"""The kernels, what they are measured on, and how."""
