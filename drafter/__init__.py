"""The DFlash drafter: its configuration, the one mask rule, the model, the sparse head, its folder format."""
