"""The work behind the sub-commands of `megaverl.cli`, one module each."""
