"""What plug-ins import from verl's workers; `reward_manager` is all there is."""
