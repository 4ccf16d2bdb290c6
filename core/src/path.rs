//! Which network the data of a pair of nodes takes, decided in their hand-shake.
//!
//! The caller says what it wishes and whether it can use RDMA; the acceptor decides from that and from its own. Nobody
//! ends up on a network that its operator has ruled out, and everybody learns why it is the one it is.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;

/// What an operator wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// RDMA where both sides have a device for it, TCP otherwise.
    #[default]
    Auto,
    /// RDMA; nothing else will do.
    Rdma,
    /// TCP only.
    Tcp,
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Wish, String> {
        match text {
            "auto" => Ok(Wish::Auto),
            "rdma" => Ok(Wish::Rdma),
            "tcp" => Ok(Wish::Tcp),
            other => Err(format!("unknown transport '{other}', expected auto, rdma or tcp")),
        }
    }
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wish::Auto => "auto",
            Wish::Rdma => "rdma",
            Wish::Tcp => "tcp",
        })
    }
}

/// What one side wishes and can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ability {
    /// What its operator wants.
    pub wish: Wish,
    /// Whether it can use RDMA now; if not, why: a clause like "node 3 has no RDMA device".
    pub rdma: Result<(), String>,
}

impl Ability {
    /// A side that knows TCP only.
    pub fn tcp() -> Ability {
        Ability { wish: Wish::Tcp, rdma: Err(String::new()) }
    }
}

/// The network chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// A queue pair, beside the TCP connection that set it up.
    Rdma,
    /// The TCP connection itself.
    Tcp,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Rdma => "rdma",
            Path::Tcp => "tcp",
        })
    }
}

/// Two sides that cannot agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// Why, as seen from a third person: continues "refused: …".
    pub text: String,
    /// Only another configuration mends it, no second attempt.
    pub is_final: bool,
}

/// Decides for a pair, with the reason.
///
/// # Errors
/// One side insists on what the other does not want or cannot do now.
pub fn decide(caller: &Ability, acceptor: &Ability) -> Result<(Path, String), Disagreement> {
    let insists = caller.wish == Wish::Rdma || acceptor.wish == Wish::Rdma;
    for (name, side) in [("the caller", caller), ("the called node", acceptor)] {
        if side.wish == Wish::Tcp {
            if insists {
                let text =
                    format!("{name} uses TCP only and the other side RDMA only: the transports configured differ");
                return Err(Disagreement { text, is_final: true });
            }
            return Ok((Path::Tcp, format!("{name} is set to tcp")));
        }
    }
    for (name, side) in [("the caller", caller), ("the called node", acceptor)] {
        if let Err(why) = &side.rdma {
            if insists {
                let text = format!("RDMA is insisted on and {name} cannot use it: {why}");
                return Err(Disagreement { text, is_final: false });
            }
            return Ok((Path::Tcp, format!("{name} cannot use RDMA: {why}")));
        }
    }
    Ok((Path::Rdma, "both sides have an RDMA device".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(wish: Wish, rdma: Result<(), &str>) -> Ability {
        Ability { wish, rdma: rdma.map_err(str::to_owned) }
    }

    #[test]
    fn rdma_is_taken_when_both_can_and_nobody_objects() {
        let (auto, rdma, tcp) = (side(Wish::Auto, Ok(())), side(Wish::Rdma, Ok(())), side(Wish::Tcp, Ok(())));
        let none = side(Wish::Auto, Err("it has no device"));
        let chosen = |caller, acceptor| decide(caller, acceptor).map(|(path, _)| path);
        for pair in [[&auto, &auto], [&auto, &rdma], [&rdma, &auto], [&rdma, &rdma]] {
            assert_eq!(chosen(pair[0], pair[1]), Ok(Path::Rdma));
        }
        for pair in [[&auto, &tcp], [&tcp, &auto], [&none, &auto], [&auto, &none], [&none, &tcp], [&tcp, &tcp]] {
            assert_eq!(chosen(pair[0], pair[1]), Ok(Path::Tcp));
        }
        let why = decide(&auto, &none).unwrap().1;
        assert_eq!(why, "the called node cannot use RDMA: it has no device");
        assert_eq!(decide(&tcp, &none).unwrap().1, "the caller is set to tcp");
    }

    #[test]
    fn who_insists_is_not_talked_into_tcp() {
        let (rdma, tcp) = (side(Wish::Rdma, Ok(())), side(Wish::Tcp, Ok(())));
        let none = side(Wish::Auto, Err("it has no device"));
        assert!(decide(&rdma, &tcp).unwrap_err().is_final);
        assert!(decide(&tcp, &rdma).unwrap_err().is_final);
        let error = decide(&none, &rdma).unwrap_err();
        assert_eq!(error.text, "RDMA is insisted on and the caller cannot use it: it has no device");
        assert!(!error.is_final, "a device may come");
    }

    #[test]
    fn wishes_come_back() {
        for wish in [Wish::Auto, Wish::Rdma, Wish::Tcp] {
            assert_eq!(wish.to_string().parse(), Ok(wish));
        }
        assert!("roce".parse::<Wish>().unwrap_err().contains("auto, rdma or tcp"));
    }
}
