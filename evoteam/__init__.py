"""Teams of agents that write GPU kernels, and a supervisor that rewrites the team when work stalls."""
