"""A package of verl's name for launch scripts and plug-ins written for it. Re-exports only; the code is Paddock's."""
