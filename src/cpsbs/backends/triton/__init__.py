"""The search on a GPU: Triton kernels, recorded steps and workspaces."""
