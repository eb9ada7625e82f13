"""Runs programs that a model wrote, where they can do no harm: on this machine, or by a SandboxFusion service."""
