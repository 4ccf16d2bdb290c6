//! Secrets from files, what they grant, and that they show nowhere.

use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::*;
use crate::handshake::proof::{Exchange, Side};

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("antelog-access-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, bytes: &[u8], mode: u32) -> String {
        use std::io::Write;
        let path = self.0.join(name);
        let mut options = File::options();
        let mut file = options.write(true).create_new(true).mode(mode).open(&path).unwrap();
        file.write_all(bytes).unwrap();
        // Whatever the mask of this process is.
        file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        path.to_string_lossy().into_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(tables: &str) -> Config {
    let rest = "[[shard]]\nid = 0\n[[node]]\nid = 0\nrole = \"sequencer\"\nlisten = \"h:1\"\n\
                [[node]]\nid = 1\nrole = \"primary\"\nshard = 0\nclients = \"h:2\"\n";
    Config::parse(&format!("{tables}\n{rest}"), &[]).unwrap()
}

#[test]
fn files_that_are_no_secrets_are_refused_in_one_line() {
    let folder = Folder::new("files");
    let error = |path: &str| {
        let error = Secret::read(path).unwrap_err();
        assert!(error.contains(path) && !error.contains('\n'), "{error}");
        error
    };
    assert!(error(&folder.file("short", b"fifteen bytes..\n\n", 0o600)).contains("15 bytes, at least 16 are needed"));
    for mode in [0o604, 0o602, 0o644, 0o666] {
        let path = folder.file(&format!("open-{mode:o}"), &[7; 32], mode);
        assert!(error(&path).contains(&format!("(mode {mode:o}): chmod 600 it")));
    }
    assert!(error(&folder.file("long", &[7; 4097], 0o600)).contains("more than 4096 bytes are no secret"));
    assert!(error(&folder.0.join("missing").to_string_lossy()).contains("cannot read it: No such file"));
    assert!(error(&folder.0.to_string_lossy()).contains("it is no file"));
}

#[test]
fn line_ends_do_not_belong_to_a_secret_and_it_is_not_printed() {
    let folder = Folder::new("ends");
    let plain = Secret::read(folder.file("plain", b"sixteen bytes ok", 0o600)).unwrap();
    let edited = Secret::read(folder.file("edited", b"sixteen bytes ok\r\n", 0o640)).unwrap();
    assert_eq!(plain, edited);
    assert_ne!(plain, Secret::new(b"sixteen bytes no").unwrap());
    assert_eq!(format!("{plain:?}"), "Secret(…)");
}

#[test]
fn roles_and_limits_come_from_the_tables() {
    let folder = Folder::new("roles");
    let file = |name: &str| folder.file(name, format!("the secret of {name}").as_bytes(), 0o600);
    let tables = format!(
        "[cluster]\nsecret_file = {:?}\nclient_appends_per_s = 9\nclient_subscriptions_max = 2\n\
         [[access]]\nrole = \"read\"\nsecret_file = {:?}\n\
         [[access]]\nrole = \"append\"\nsecret_file = {:?}\nappends_per_s = 0\nbytes_per_s = 7\nsubscriptions_max = 3\n",
        file("cluster"),
        file("reader"),
        file("writer")
    );
    let config = config(&tables);
    assert_eq!(Config::parse(&config.to_string(), &[]), Ok(config.clone()));
    assert!(!config.to_string().contains("the secret of"));
    let keys = Keyring::load(&config, true).unwrap();
    let client = Endpoint::Client { session: 1 };
    assert_eq!(keys.of(&client).len(), 3);
    assert_eq!(keys.of(&Endpoint::Node { from: 1, to: 0, incarnation: 1 }), [keys.cluster().unwrap().clone()]);
    let limits =
        |appends_per_s, bytes_per_s, subscriptions_max| Limits { appends_per_s, bytes_per_s, subscriptions_max };
    assert_eq!(keys.grant(Some(0)), Grant { access: Access::Admin, limits: limits(9, 0, 2) });
    assert_eq!(keys.grant(Some(1)), Grant { access: Access::Read, limits: limits(9, 0, 2) });
    assert_eq!(keys.grant(Some(2)), Grant { access: Access::Append, limits: limits(0, 7, 3) });
    // A node without clients does not need their secrets.
    std::fs::remove_file(folder.0.join("reader")).unwrap();
    assert_eq!(Keyring::load(&config, false).unwrap().of(&client).len(), 1);
    let error = Keyring::load(&config, true).unwrap_err();
    assert!(error.starts_with("[[access]] role read: secret file ") && error.contains("No such file"), "{error}");
}

#[test]
fn without_a_secret_everybody_is_let_in_and_tables_are_refused() {
    let open = Keyring::load(&config("[cluster]\nclient_bytes_per_s = 5"), true).unwrap();
    assert!(open.cluster().is_none() && open.of(&Endpoint::Client { session: 1 }).is_empty());
    assert_eq!((open.grant(None).access, open.grant(None).limits.bytes_per_s), (Access::Admin, 5));
    let error = Config::parse("node = []\nshard = []\n[[access]]\nrole = \"read\"\nsecret_file = \"x\"\n", &[]);
    assert!(error.unwrap_err().0.starts_with("[[access]] needs cluster.secret_file"));
    let error = Config::parse("node = []\nshard = []\n[[access]]\nrole = \"root\"\nsecret_file = \"x\"\n", &[]);
    assert!(error.unwrap_err().0.contains("unknown variant `root`, expected one of `read`, `append`, `admin`"));
}

#[test]
fn the_same_secret_for_two_roles_is_refused() {
    let folder = Folder::new("twice");
    let (first, second) = (folder.file("a", &[7; 16], 0o600), folder.file("b", &[7; 16], 0o600));
    let tables = format!("[cluster]\nsecret_file = {first:?}\n[[access]]\nrole = \"read\"\nsecret_file = {second:?}\n");
    let error = Keyring::load(&config(&tables), true).unwrap_err();
    assert!(error.contains("another file has the same secret"), "{error}");
}

#[test]
fn a_file_named_in_the_environment_goes_to_the_cluster() {
    let set = |value: &str| Config::environment([("ANTELOG_SECRET_FILE".to_owned(), value.to_owned())].into_iter());
    let text = config("").to_string();
    for path in ["/run/secret", "17", "a \"b\" = c"] {
        let config = Config::parse(&text, &set(path)).unwrap();
        assert_eq!(config.cluster.secret_file.as_deref(), Some(path));
    }
}

#[test]
fn a_proof_holds_for_one_side_and_exactly_what_was_said() {
    let secrets = [Secret::new(&[1; 16]).unwrap(), Secret::new(&[2; 16]).unwrap()];
    let said = |messages: &[&[u8]]| {
        let mut exchange = Exchange::default();
        messages.iter().for_each(|message| exchange.add(message));
        exchange
    };
    let proof = said(&[b"hello", b"challenge"]).prove(&secrets[1], Side::Caller);
    assert_eq!(said(&[b"hello", b"challenge"]).proven(&secrets, Side::Caller, &proof), Some(1));
    assert_eq!(said(&[b"hello", b"challenge"]).proven(&secrets[..1], Side::Caller, &proof), None);
    assert_eq!(said(&[b"hello", b"challenge"]).proven(&secrets, Side::Acceptor, &proof), None);
    assert_eq!(said(&[b"helloc", b"hallenge"]).proven(&secrets, Side::Caller, &proof), None);
    assert_eq!(said(&[b"hello", b"challenge", b""]).proven(&secrets, Side::Caller, &proof), None);
}

#[test]
fn proofs_are_hmac_sha_256_as_published() {
    // RFC 4231, test case 2.
    let mac = mac(b"Jefe", &[b"what do ya want ", b"for nothing?"]).finalize().into_bytes();
    let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}
