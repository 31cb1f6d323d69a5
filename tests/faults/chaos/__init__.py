"""The referee ckpt-chaos (a third party's) over our trainings, and over those that it brings along."""
