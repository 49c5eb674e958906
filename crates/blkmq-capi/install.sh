#!/bin/sh
# Installs the library for C where cargo-c is not there: the shared and the static library, the header, and what
# pkg-config reads. First: cargo build --release -p blkmq-capi
#
# ./install.sh [--from DIRECTORY] [--prefix /usr/local] [--libdir PREFIX/lib]
#
# DIRECTORY has the libraries that Cargo made, target/release by default. DESTDIR goes before every path.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
from=$here/../../target/release prefix=/usr/local libdir=
while [ $# -gt 1 ]; do
    case $1 in
        --from) from=$2 ;;
        --prefix) prefix=$2 ;;
        --libdir) libdir=$2 ;;
        *) break ;;
    esac
    shift 2
done
[ $# -eq 0 ] || { echo "$0: $1: not known, or without a value" >&2; exit 2; }
libdir=${libdir:-$prefix/lib}
# A crate of a registry has its own version; in the project all have one.
for manifest in "$here/Cargo.toml" "$here/../../Cargo.toml"; do
    version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$manifest" | head -n 1)
    [ -z "$version" ] || break
done
soname=libblkmq.so.${version%.*}

lib=${DESTDIR-}$libdir include=${DESTDIR-}$prefix/include
mkdir -p "$lib/pkgconfig" "$include"
install -m 755 "$from/libblkmq_capi.so" "$lib/libblkmq.so.$version"
ln -sf "libblkmq.so.$version" "$lib/$soname"
ln -sf "$soname" "$lib/libblkmq.so"
install -m 644 "$from/libblkmq_capi.a" "$lib/libblkmq.a"
install -m 644 "$here/include/blkmq.h" "$include/blkmq.h"
cat > "$lib/pkgconfig/blkmq.pc" <<END
prefix=$prefix
libdir=$libdir
includedir=\${prefix}/include

Name: blkmq
Description: The multi-queue block layer in one's own process
Version: $version
Libs: -L\${libdir} -lblkmq
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
Cflags: -I\${includedir}
END
