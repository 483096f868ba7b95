//! Type names with several meanings in `crates`.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use super::Source;

/// Maximum definitions of a name.
const MOST_MEANINGS: usize = 2;
const MOST_NAMES: usize = 15;

/// Prints the number of ambiguous names; returns them if they are too many.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources
        .iter()
        .filter(|source| source.path.starts_with("crates"))
    {
        let mut walk = Walk(Vec::new());
        for item in &source.items {
            walk.visit_item(item);
        }
        for (name, line) in walk.0 {
            places.entry(name).or_default().push(source.at(line));
        }
    }
    places.retain(|_, places| places.len() > MOST_MEANINGS);
    let limit = format!("{MOST_MEANINGS} meanings, {MOST_NAMES} are allowed");
    super::print("names of types", places.len(), &limit);
    if places.len() <= MOST_NAMES {
        return Vec::new();
    }
    let text = |(name, places): (String, Vec<String>)| {
        format!("{name} has {} meanings: {}", places.len(), places.join(" "))
    };
    places.into_iter().map(text).collect()
}

struct Walk(Vec<(String, usize)>);

impl Walk {
    fn note(&mut self, name: &syn::Ident) {
        self.0.push((name.to_string(), name.span().start().line));
    }
}

impl<'ast> Visit<'ast> for Walk {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.note(&item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.note(&item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.note(&item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.note(&item.ident);
        visit::visit_item_trait(self, item);
    }
}
