//! The length of functions.

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::Source;

const MOST_LINES: usize = 80;

/// Prints the number of long functions; returns them.
pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let mut long = Vec::new();
    for source in sources {
        let mut walk = Walk { found: Vec::new() };
        for item in &source.items {
            walk.visit_item(item);
        }
        for (name, line, lines) in walk.found {
            long.push(format!("{}: fn {name} has {lines} lines", source.at(line)));
        }
    }
    super::print("functions", long.len(), &format!("{MOST_LINES} lines"));
    long
}

struct Walk {
    found: Vec<(String, usize, usize)>,
}

impl Walk {
    fn measure(&mut self, signature: &syn::Signature, end: Span) {
        let first = signature.fn_token.span().start().line;
        let lines = end.end().line + 1 - first;
        if lines > MOST_LINES {
            self.found.push((signature.ident.to_string(), first, lines));
        }
    }
}

impl<'ast> Visit<'ast> for Walk {
    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.measure(&function.sig, function.block.span());
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.measure(&function.sig, function.block.span());
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.measure(&function.sig, block.span());
        }
    }
}
