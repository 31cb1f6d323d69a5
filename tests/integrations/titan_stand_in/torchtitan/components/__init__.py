"""Where torchtitan is not installed; see tests/integrations/titan.py."""
