"""The option of methods that compare anchors with m prototypes; free of torch."""

from pydantic import Field

from neuclip_ds.section import Section


class PrototypesConfig(Section):
    """Base of their sections, by which planning finds m."""

    prototypes: int = Field(4096, ge=1, le=1 << 24)
    """Prototypes m of each side."""
