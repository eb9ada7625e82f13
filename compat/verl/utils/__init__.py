"""What plug-ins import from verl's tools; `reward_score` is all there is."""
