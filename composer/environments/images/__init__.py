"""Images: what a machine starts from, built from the distribution's packages.

    composer images build postgres

An image is a folder with `tree/` (a root filesystem, for the `namespace`
driver), `root.ext4` (the same as a disk), `vmlinuz` and `initrd` (for the
`microvm` driver) and `image.json`. It is built once, without root and without
running anything of it, and kept in the user's cache. Any directory that holds a
root filesystem serves the `namespace` driver as well.
"""

from composer.environments.images.catalog import Image as Image
from composer.environments.images.catalog import cache as cache
from composer.environments.images.catalog import find as find
from composer.environments.images.catalog import found as found
