//! What the kernel's and the firewall's texts say, as pure functions.

/// How many numbers a list like `0-3,8` names.
pub fn count(list: &str) -> usize {
    let parts = list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last >= first).then(|| last - first + 1)
    });
    parts.sum()
}

/// The limit of locked memory in /proc/self/limits, in bytes; `None`: unlimited, or not told.
pub fn locked_bytes_max(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|l| l.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A value of /proc/meminfo: kilobytes where it has a unit.
pub fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The choice in brackets: `madvise` of `always [madvise] never`.
pub fn chosen(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

/// The largest RoCE packet's payload in bytes on an interface with this MTU; `None`: none fits. The kernel keeps 96 bytes
/// for the headers of RoCE.
pub fn path_mtu(interface_mtu: u32) -> Option<u32> {
    [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| mtu + 96 <= interface_mtu)
}

/// What a firewall does with a UDP port, as far as its rules tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firewall {
    /// No rule names it, and what no rule names comes in.
    Open,
    /// A rule that lets it in.
    Accepted,
    /// A rule against it.
    Refused,
    /// No rule names it, and what no rule names is dropped.
    NotNamed,
}

/// Reads the output of `nft list ruleset` or `iptables-save`.
pub fn firewall(rules: &str, port: u16) -> Firewall {
    let number = port.to_string();
    let names = |line: &str| line.split(|c: char| !c.is_ascii_digit()).any(|word| word == number);
    let says = |line: &str, words: &[&str]| {
        let line = line.to_ascii_lowercase();
        words.iter().any(|w| line.contains(w))
    };
    let named: Vec<&str> = rules.lines().filter(|l| names(l)).collect();
    if named.iter().any(|l| says(l, &["drop", "reject"])) {
        return Firewall::Refused;
    }
    if named.iter().any(|l| says(l, &["accept"])) {
        return Firewall::Accepted;
    }
    let drops = |l: &str| l.starts_with(":INPUT DROP") || (l.contains("hook input") && l.contains("policy drop"));
    if rules.lines().any(|l| drops(l.trim())) { Firewall::NotNamed } else { Firewall::Open }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_counted() {
        assert_eq!(count("0"), 1);
        assert_eq!(count("0-3,8\n"), 5);
        assert_eq!(count("0-1,4-5,7"), 5);
        assert_eq!((count(""), count("x"), count("3-1")), (0, 0, 0));
    }

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max locked memory         8388608              16777216             bytes     \n";
        assert_eq!(locked_bytes_max(text), Some(8_388_608));
        assert_eq!(locked_bytes_max("Max locked memory   unlimited   unlimited   bytes"), None);
        assert_eq!(locked_bytes_max(""), None);
    }

    #[test]
    fn memory_and_choices_are_read() {
        let text = "MemTotal:       24653856 kB\n\
                    HugePages_Total:     512\nHugePages_Free:      500\nHugepagesize:       2048 kB\n";
        assert_eq!(meminfo(text, "HugePages_Free"), Some(500));
        assert_eq!(meminfo(text, "Hugepagesize"), Some(2048));
        assert_eq!(meminfo(text, "HugePages"), None);
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("always"), None);
    }

    #[test]
    fn the_path_mtu_leaves_room_for_headers() {
        assert_eq!(path_mtu(1500), Some(1024));
        assert_eq!(path_mtu(4191), Some(2048));
        assert_eq!(path_mtu(4192), Some(4096));
        assert_eq!(path_mtu(9000), Some(4096));
        assert_eq!(path_mtu(300), None);
    }

    #[test]
    fn firewalls_are_understood_as_far_as_their_rules_tell() {
        let of = |rules: &str| firewall(rules, 4791);
        assert_eq!(of(""), Firewall::Open);
        let open =
            "table inet filter {\n\tchain input {\n\t\ttype filter hook input priority 0; policy accept;\n\t}\n}";
        assert_eq!(of(open), Firewall::Open);
        let closed = "table inet filter {\n\tchain input {\n\t\ttype filter hook input priority 0; policy drop;\n";
        assert_eq!(of(closed), Firewall::NotNamed);
        assert_eq!(of(&format!("{closed}\t\tudp dport {{ 53, 4791 }} accept\n")), Firewall::Accepted);
        assert_eq!(of(&format!("{closed}\t\tudp dport 14791 accept\n")), Firewall::NotNamed);
        assert_eq!(of("*filter\n:INPUT DROP [0:0]\n-A INPUT -p udp --dport 22 -j ACCEPT\n"), Firewall::NotNamed);
        assert_eq!(
            of("*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p udp -m udp --dport 4791 -j DROP\n"),
            Firewall::Refused
        );
    }
}
