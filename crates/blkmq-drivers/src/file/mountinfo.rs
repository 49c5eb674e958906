//! The lines of `/proc/self/mountinfo`, as proc_pid_mountinfo(5) describes them. `place` looks up the mount of a file.

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// The device number of its filesystem, as in `8:1`.
    pub(super) device: String,
    /// What is mounted, in words of the filesystem.
    pub(super) source: String,
    /// The options of the filesystem with commas between them, and those inside escaped.
    options: String,
}

impl Mount {
    /// Finds the mount with this number; `None` if it is not in `text`, or its line has another form.
    pub(super) fn find(text: &str, id: u64) -> Option<Self> {
        let id = id.to_string();
        let line = text
            .lines()
            .find(|line| line.split(' ').next() == Some(id.as_str()))?;
        // A dash ends the fields whose number varies.
        let (front, back) = line.split_once(" - ")?;
        let device = front.split(' ').nth(2)?.to_owned();
        let mut back = back.split(' ').skip(1);
        Some(Self {
            device,
            source: back.next().map(unescaped)?,
            options: back.next()?.to_owned(),
        })
    }

    /// The value of an option of the filesystem.
    pub(super) fn option(&self, name: &str) -> Option<String> {
        let pairs = self
            .options
            .split(',')
            .filter_map(|option| option.split_once('='));
        let mut values = pairs.filter_map(|(key, value)| (key == name).then_some(value));
        values.next().map(unescaped)
    }
}

/// A field without its escapes: `\040` is a space.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut bytes: Vec<u8> = parts.next().unwrap_or_default().into();
    for part in parts {
        let code = part.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
44 27 0:39 /a /srv/a rw,relatime shared:1 master:2 - btrfs /dev/sdb1 rw,subvolid=256,subvol=/a
50 27 0:51 / /var/merged rw - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/srv/my\\040disks\\054x\\134y,workdir=/w\\0
51 27 0:52 / /tank/vm\\0401 rw - zfs tank/vm\\0401 rw,xattr
52 27 broken
";

    #[test]
    fn mount_is_found_by_its_whole_number() {
        let mount = Mount::find(TEXT, 44).unwrap();
        assert_eq!((&*mount.device, &*mount.source), ("0:39", "/dev/sdb1"));
        assert_eq!(mount.option("subvol").as_deref(), Some("/a"));
        assert_eq!(mount.option("upperdir"), None);
        assert_eq!(Mount::find(TEXT, 51).unwrap().source, "tank/vm 1");
        for id in [4, 52, 440] {
            assert_eq!(Mount::find(TEXT, id), None, "{id}");
        }
        assert_eq!(Mount::find("", 1), None);
    }

    #[test]
    fn option_with_escaped_spaces_and_commas_is_whole() {
        let mount = Mount::find(TEXT, 50).unwrap();
        assert_eq!(mount.option("upperdir").as_deref(), Some("/srv/my disks,x\\y"));
        assert_eq!(mount.option("workdir").as_deref(), Some("/w\\0"));
    }
}
