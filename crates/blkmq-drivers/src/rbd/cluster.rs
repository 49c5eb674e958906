//! The connections to clusters: disks with the same connection settings share one. The first one
//! connects, and the close of the last image ends the connection.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::config::ClusterConfig;
use super::error::RbdError;
use super::sys::{Library, Rados};

/// Returns the connection for disks with these settings, made now if there is none. May block for
/// about `limit`.
pub(super) fn connect(image: &str, config: &ClusterConfig, limit: Duration) -> Result<Arc<Rados>, RbdError> {
    // librbd needs the C library that this host has, and would get a second one.
    if cfg!(target_feature = "crt-static") {
        let image = image.to_owned();
        return Err(RbdError::Static { image });
    }
    let library = Library::get().map_err(|problem| RbdError::Library {
        image: image.to_owned(),
        problem,
    })?;
    CONNECTIONS.get(config, || {
        let made = Rados::connect(library, config, &options(config, limit, processors()));
        let rados = made.map_err(|error| RbdError::Call {
            image: image.to_owned(),
            advice: match error.is_option {
                true => "".into(),
                false => advice(error.source.raw_os_error()).into(),
            },
            action: error.action,
            error: error.source,
        })?;
        tracing::info!("rbd: connected to cluster {}", rados.fsid());
        Ok(rados)
    })
}

/// Has the next disk with these settings make a connection of its own, because the cluster has barred this one. Its
/// images keep it until they are closed.
pub(super) fn leave(config: &ClusterConfig, barred: &Arc<Rados>) {
    CONNECTIONS.leave(config, barred);
}

/// Connections by their settings.
struct Connections<T>(Mutex<Vec<(ClusterConfig, Entry<T>)>>);

/// A connection as long as somebody has it. Locked during the connect: others with its settings want
/// the same one.
type Entry<T> = Arc<Mutex<Weak<T>>>;

impl<T> Connections<T> {
    /// Returns the connection with these settings, made by `connect` if there is none. Waits for
    /// nobody with other settings.
    fn get<E>(&self, config: &ClusterConfig, connect: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let entry = self.entry(config);
        let mut known = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = known.upgrade() {
            return Ok(connection);
        }
        let made = Arc::new(connect()?);
        *known = Arc::downgrade(&made);
        Ok(made)
    }

    /// Forgets a connection, unless another one has taken its place.
    fn leave(&self, config: &ClusterConfig, connection: &Arc<T>) {
        let entry = self.entry(config);
        let mut known = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if known.as_ptr() == Arc::as_ptr(connection) {
            *known = Weak::new();
        }
    }

    /// The entry for these settings, and no more of those that nobody uses.
    fn entry(&self, config: &ClusterConfig) -> Entry<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain_mut(|(_, entry)| match Arc::get_mut(entry) {
            Some(known) => {
                let known = known.get_mut().unwrap_or_else(PoisonError::into_inner);
                known.strong_count() > 0
            }
            // Somebody connects.
            None => true,
        });
        if let Some((_, entry)) = all.iter().find(|(known, _)| known == config) {
            return Arc::clone(entry);
        }
        let entry = Entry::default();
        all.push((config.clone(), Arc::clone(&entry)));
        entry
    }
}

/// Ceph's options for a connection; those of the disk come last, and prevail.
fn options(config: &ClusterConfig, limit: Duration, processors: usize) -> Vec<(String, String)> {
    let seconds = |time: Duration| time.as_secs().to_string();
    let mut options = vec![
        // Data of a write that was reported complete must not be only in this process: it may be
        // killed at any moment.
        ("rbd_cache", "false".to_owned()),
        ("client_mount_timeout", seconds(limit)),
        ("rados_mon_op_timeout", seconds(limit)),
        ("rados_osd_op_timeout", seconds(config.timeout)),
    ];
    if processors < PROCESSORS_FOR_MORE_THREADS {
        // A thread that ends one request finds the next one there, and is woken less often.
        options.push(("librados_thread_count", "1".to_owned()));
    }
    if let Some(keyring) = &config.keyring {
        options.push(("keyring", keyring.clone()));
    }
    let given = config.options.iter().cloned();
    let ours = options.into_iter().map(|(key, value)| (key.to_owned(), value));
    ours.chain(given).collect()
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

fn advice(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::ENOENT) => {
            ": name the cluster's configuration file with conf=, and the user's key with keyring="
        }
        Some(libc::EACCES | libc::EPERM) => {
            ": the cluster does not know this user with this key; see id= and keyring="
        }
        Some(libc::ETIMEDOUT) => ": see whether the monitors run and can be reached (ceph -s)",
        _ => "",
    }
}

/// Ceph has two threads for completions whatever the machine. On two processors one takes 15 to 20 % less
/// CPU for each request, and loses no throughput.
const PROCESSORS_FOR_MORE_THREADS: usize = 4;
static CONNECTIONS: Connections<Rados> = Connections(Mutex::new(Vec::new()));

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn cluster(name: &str) -> ClusterConfig {
        ClusterConfig {
            conf: Some(name.to_owned()),
            ..ClusterConfig::default()
        }
    }

    #[test]
    fn few_processors_have_one_thread_for_completions_and_the_disks_own_options_prevail() {
        let mut config = cluster("a");
        let threads = |config: &ClusterConfig, processors| {
            let options = options(config, Duration::from_secs(30), processors);
            let mut set = options
                .into_iter()
                .filter(|(key, _)| key == "librados_thread_count");
            set.next_back().map(|(_, count)| count)
        };
        assert_eq!(threads(&config, 2).as_deref(), Some("1"));
        assert_eq!(threads(&config, 4), None);
        config.options.push(("librados_thread_count".into(), "3".into()));
        assert_eq!(threads(&config, 2).as_deref(), Some("3"));
    }

    #[test]
    fn cluster_that_does_not_answer_keeps_nobody_from_another() {
        let all = Connections(Mutex::new(Vec::new()));
        let (goes_on, hangs) = mpsc::channel::<()>();
        let (begins, begun) = mpsc::channel();
        thread::scope(|scope| {
            let all = &all;
            let dead = scope.spawn(move || {
                all.get(&cluster("dead"), move || {
                    begins.send(()).unwrap();
                    hangs.recv().map(|()| 0)
                })
            });
            begun.recv().unwrap();
            assert_eq!(all.get(&cluster("well"), || Ok::<_, ()>(1)).as_deref(), Ok(&1));
            drop(goes_on);
            assert!(dead.join().unwrap().is_err());
        });
        // The failure is not kept.
        assert_eq!(all.get(&cluster("dead"), || Ok::<_, ()>(2)).as_deref(), Ok(&2));
    }

    #[test]
    fn disks_with_the_same_settings_share_a_connection_as_long_as_one_has_it() {
        let all = Connections(Mutex::new(Vec::new()));
        let first = all.get(&cluster("a"), || Ok::<_, ()>(1)).unwrap();
        let second = all.get(&cluster("a"), || Err(())).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop((first, second));
        assert_eq!(all.get(&cluster("a"), || Ok::<_, ()>(3)).as_deref(), Ok(&3));
        assert_eq!(all.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn connection_that_is_left_is_kept_by_those_who_have_it_and_taken_by_nobody_else() {
        let all = Connections(Mutex::new(Vec::new()));
        let get = |number| all.get(&cluster("a"), || Ok::<_, ()>(number)).unwrap();
        let (first, second) = (get(1), get(1));
        all.leave(&cluster("a"), &first);
        let third = get(2);
        assert_eq!((*first, *third), (1, 2));
        // Who finds later that the first one is barred leaves the others theirs.
        all.leave(&cluster("a"), &second);
        assert!(Arc::ptr_eq(&get(3), &third));
    }
}
