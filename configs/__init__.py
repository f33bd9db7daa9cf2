"""What a run is: one YAML, read by every stage. Pure pydantic and YAML; importing this room loads no torch."""
